"""Fixtures: launch commands, jobs, virtual clusters, and a check that fails a test which leaves anything behind."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

import distrib
from distrib_launch.cli import launch as launch_command
from tests import fork_server
from tests.virtual_cluster import Cluster, why_unavailable
from tests.virtual_cluster.virtual import OWN_NAMES

if TYPE_CHECKING:
    from distrib.training import Job

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
LAUNCH = BIN / "distrib-launch"
TOPO = BIN / "distrib-topo"
SCRIPTS = Path(__file__).parent / "scripts"
JOB = SCRIPTS / "job.py"
MARK = "TEST_SESSION_OF_DISTRIB"
PRIORITIZED_NICE = -19
PROCESS_FIXTURES = {"launch", "bring_up"}

# The duration of an example depends more on the machine than on the example.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


HAS_GPU = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden from the output of this run")


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = str(os.getpid())
    if HAS_GPU and not _is_for_gpus(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the other tests use CPUs, and have more ranks than there are GPUs
    if os.environ.get("DISTRIB_TEST_CLUSTER") == "required" and (why := why_unavailable()):
        pytest.exit(f"the virtual cluster is required but cannot be built here: {why}", returncode=3)


def _is_for_gpus(config: pytest.Config) -> bool:
    return re.search(r"(?<!not )\bgpu\b", str(config.getoption("markexpr"))) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    why = why_unavailable()
    no_gpu = "" if HAS_GPU and _is_for_gpus(config) else "pytest -m gpu runs it" if HAS_GPU else "no NVIDIA GPU here"
    no_horovod = importlib.util.find_spec("horovod") is None and os.environ.get("DISTRIB_TEST_HOROVOD") != "required"
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}  # item.keywords have the names of folders, too
        if PROCESS_FIXTURES & set(getattr(item, "fixturenames", ())) or {"cluster", "forked", "gpu"} & marks:
            item.add_marker("processes")
        if "cluster" in marks and why:
            item.add_marker(pytest.mark.skip(reason=f"no virtual cluster: {why}"))
        if "gpu" in marks and no_gpu:
            item.add_marker(pytest.mark.skip(reason=no_gpu))
        if "horovod" in marks and no_horovod:
            item.add_marker(pytest.mark.skip(reason="Horovod is not installed: scripts/build-horovod builds it"))
    # Long tests first, so that short ones fill the end. Horovod is built beside the others.
    items.sort(
        key=lambda item: (
            [item.get_closest_marker(name) is not None for name in ("alone", "horovod")]
            + [item.get_closest_marker("processes") is None]
        )
    )


def our_processes() -> dict[int, str]:
    """Return the processes that this test session started on this machine, directly or not: number to command line."""
    mark = f"\0{MARK}={os.getpid()}\0".encode()
    found = {}
    for name in os.listdir("/proc"):  # twice per test, so without a Path for each process
        if name.isdigit() and int(name) not in (os.getpid(), fork_server.server_process()):
            with contextlib.suppress(OSError):
                environ = os.open(f"/proc/{name}/environ", os.O_RDONLY)
                try:
                    is_ours = mark in b"\0" + os.read(environ, 1 << 18)
                finally:
                    os.close(environ)
                if is_ours:
                    command = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(name)] = command.decode(errors="replace")
    return found


@pytest.fixture(autouse=True)
def its_turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run a test marked `alone` only while no other test runs (`pytest -n`)."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with (tmp_path_factory.getbasetemp().parent / "turns").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if request.node.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for processes forked by the test


@pytest.fixture(autouse=True)
def horovod_is_built(request: pytest.FixtureRequest) -> None:
    """Wait for the Horovod that ./scripts/test builds beside the tests."""
    built = os.environ.get("DISTRIB_HOROVOD_BUILT")
    deadline = time.monotonic() + 600
    while built and request.node.get_closest_marker("horovod") and not Path(built).exists():
        assert time.monotonic() < deadline, "scripts/build-horovod does not end"
        time.sleep(1)


@pytest.fixture(autouse=True)
def priority(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give a test marked `prioritized` the CPUs before the tests beside it (`pytest -n`)."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    raised = "prioritized" in request.keywords and os.geteuid() == 0
    if raised:
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITIZED_NICE)
    yield
    if raised:
        os.setpriority(os.PRIO_PROCESS, 0, nice)


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fork the scripts of the ranks that a test marked `forked` starts on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        if "forked" in request.keywords:
            for name, value in fork_server.environment(os.environ.get("PYTHONPATH", "")).items():
                patch.setenv(name, value)
        yield


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, namespaces, variables or files behind."""
    environ = dict(os.environ)
    processes = set(our_processes())
    files = set(os.listdir(ROOT)) | set(os.listdir(ROOT / "tests"))
    yield
    deadline = time.monotonic() + 6
    while (left := {p: c for p, c in our_processes().items() if p not in processes}) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"
    if Path("/run/netns").exists():
        namespaces = [name for name in os.listdir("/run/netns") if name.startswith(OWN_NAMES)]
        assert not namespaces, "network namespaces left behind"
    now = dict(os.environ)
    now.pop("PYTEST_CURRENT_TEST", None)
    environ.pop("PYTEST_CURRENT_TEST", None)
    assert now == environ, "environment variables changed"
    new = (set(os.listdir(ROOT)) | set(os.listdir(ROOT / "tests"))) - files
    assert not {name for name in new if not name.startswith(".") and name != "__pycache__"}, f"files left behind: {new}"


@pytest.fixture
def inductor_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set the variable, which torch.optim sets at its first use. The check for changed variables would report it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job of this process only, for any launcher of the tests."""
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "DISTRIB_STRATEGY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISTRIB_DEVICE", "cpu")
    monkeypatch.setattr("distrib.training.job.current_job", None)
    with distrib.init() as alone:
        yield alone


@pytest.fixture
def bring_up() -> Iterator[Callable[[Cluster], None]]:
    """Bring virtual clusters up, and take all of them down when the test ends."""
    with contextlib.ExitStack() as downs:

        def up(cluster: Cluster) -> None:
            downs.callback(cluster.down)
            cluster.up()

        yield up


@pytest.fixture
def make_cluster(bring_up: Callable[[Cluster], None]) -> Callable[..., Cluster]:
    """Build virtual clusters that last as long as the test."""

    def build(hosts: int, **options: Any) -> Cluster:
        cluster = Cluster(hosts, **{"login_environment": fork_server.login_environment(), **options})
        bring_up(cluster)
        return cluster

    return build


def call(
    main: Callable[[list[str]], int], *words: object, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command in this process with captured output. A separate Python would take longer to start."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(cwd or Path.cwd())
        for name, value in {"COLUMNS": "80", **environ}.items():
            patch.setenv(name, value)
        try:
            code = main([str(word) for word in words])
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    told = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, code, *told)


class Run:
    """Finished launch: exit code, output and `result.json`."""

    def __init__(self, process: subprocess.CompletedProcess[str], run_dir: Path, seconds: float) -> None:
        self.code = process.returncode
        self.out = process.stdout
        self.err = process.stderr
        self.run_dir = run_dir
        self.seconds = seconds

    @property
    def result(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
        return loaded

    def __repr__(self) -> str:
        return f"exit {self.code} after {self.seconds:.1f} s\n--- out\n{self.out}\n--- err\n{self.err}"


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Run]:
    """Run `distrib-launch` to its end, here or on a host of a cluster, and return its `Run`."""
    count = 0

    def run(
        *arguments: str | os.PathLike[str],
        cluster: Cluster | None = None,
        on: str = "n1",
        timeout: float = 240,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        wrapper: Sequence[str] = (),
    ) -> Run:
        nonlocal count
        count += 1
        run_dir = tmp_path / f"run{count}"
        command: Sequence[str] = [*wrapper, str(LAUNCH), "--run-dir", str(run_dir), *map(str, arguments)]
        environ = {"OMP_NUM_THREADS": "1", **(env or {})}
        started = time.monotonic()
        if cluster:
            process = cluster.run(on, command, timeout=timeout, env=environ, cwd=cwd or tmp_path)
        else:
            process = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout,
                env={**os.environ, **environ}, cwd=cwd or tmp_path,
            )  # fmt: skip
        return Run(process, run_dir, time.monotonic() - started)

    return run


@pytest.fixture
def launch_in_process(tmp_path: Path) -> Callable[..., Run]:
    """Run `distrib-launch` in this process: for plans, manifests and refusals, which start nothing."""

    def run(*arguments: object, env: Mapping[str, str] | None = None) -> Run:
        run_dir = tmp_path / "run"
        return Run(
            call(launch_command.main, "--run-dir", run_dir, *arguments, cwd=tmp_path, **(env or {})), run_dir, 0.0
        )

    return run
