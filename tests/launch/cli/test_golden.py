"""Output of each command, word for word: tests/golden has one file per command; `pytest --update-golden` writes them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distrib_launch.cli import launch, topo
from tests.conftest import LAUNCH, ROOT, TOPO, call

GOLDEN = ROOT / "tests" / "golden"
HOSTFILES = ROOT / "hostfiles"
TRAINS = """\
import os, time
import torch
import distrib

job = distrib.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(400, 4))
model, optimizer, loader = job.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=4))
for step, (batch,) in enumerate(loader):
    model(batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 10 and job.rank == 1:
        {end}
job.print(f"{step + 1} steps")
"""


def with_placeholders(text: str, folder: Path, varies: str) -> str:
    """Replace what differs between two runs or two machines.

    Args:
        text: Output of a command.
        folder: Its working directory.
        varies: `paths`, `times`: also times, rates and shares, or `numbers`: all numbers and widths of tables.
    """
    for path in (folder, LAUNCH.parent):
        text = text.replace(f"{path}/", "").replace(str(path), "FOLDER")
    text = text.replace(sys.prefix, "VENV").replace(f"{ROOT}/", "").replace(str(ROOT), "FOLDER")
    text = re.sub(r"distrib-runs/\d{8}-\d{6}", "distrib-runs/TIME", text)
    text = re.sub(r"/tmp/distrib-\w+|\S*/site-packages/|\S*/lib/python3[^/]*/| --allow-run-as-root", "", text)
    text = re.sub(r"\d+ cores, expected at most \d+", "# cores, expected at most #", text)
    text = re.sub(r"(?m)^.*running as root.*\n", "", text)
    if varies == "times":
        text = re.sub(r"\d[\d,]*(\.\d+)?( s\b| samples/s|%)", r"#\2", text)
        text = re.sub(r"(ranks? [-\d,]+): (was|were|lost) .*", r"\1: STOPPED OR DISCONNECTED", text)
    if varies == "numbers":
        text = re.sub(r"(?m)^note: .*\n( .*\n)*|^probe: .*\n?", "", text)  # findings and phases of some measurements
        text = re.sub(r"\d+ findings?", "# findings", text)
        text = re.sub(r"n\d to n\d|(?<=GB/s )n\d", "HOST", re.sub(r"-{3,}", "---", text))
        text = re.sub(r"(?<![\w.#])\d[\d.,]*( ?[um]?s\b)?", "#", text)
        text = re.sub(r"(?m) {3,}", "  ", text)
    return text


@pytest.fixture
def matches(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Compare commands and their output with a golden file, or write that file."""

    def check(name: str, *runs: tuple[str, subprocess.CompletedProcess[str]], varies: str = "paths") -> None:
        shown = ""
        for command, done in runs:
            output = with_placeholders(done.stdout + done.stderr, tmp_path, varies)
            shown += f"$ {command}\n{output.rstrip()}\n[exit {done.returncode}]\n"
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("update_golden"):
            path.write_text(shown)
        assert shown == path.read_text()

    return check


@pytest.fixture
def hosts(tmp_path: Path, make_cluster):
    """Build a virtual cluster of three hosts, with the hostfile `hosts.txt` in the test's folder."""
    (tmp_path / "hosts.txt").write_text("n1 slots=1\nn2 slots=1\nn3 slots=1\n")
    return lambda **options: make_cluster(3, **options)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("launch-usage", "distrib-launch"),
        ("launch-help", "distrib-launch --help"),
        ("topo-help", "distrib-topo --help"),
        ("dry-run", "distrib-launch -H a:2,b:2,c:1 --dry-run train.py --epochs 3"),
        ("plan", "distrib-topo plan --workload ResNet-50 --gpu A100 --network 25GbE --nodes 1..16"),
        ("show", "distrib-topo show -H mixed-gpus.txt"),
    ],
)
def test_output_without_hosts(tmp_path, matches, name, command):
    for each in HOSTFILES.glob("mixed-gpus.*"):
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "train.py").touch()
    program, *words = command.split()
    main = launch.main if program == "distrib-launch" else topo.main
    matches(name, (command, call(main, *words, cwd=tmp_path)))


def test_output_of_refusals(tmp_path, matches):
    (tmp_path / "train.py").touch()
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/train_cnn.py").touch()
    (tmp_path / "hosts.txt").write_text("n1 slots=2\nn1 slot=3\n")
    commands = [
        "--epochs 3 train.py", "train.p", "exmples/train_cnn.py", "--bucket 25 train.py", "-np 99999 train.py", "-np 0 train.py",
        "-H a:x train.py", "-H hosts.txt train.py", "-H missing.txt train.py",
    ]  # fmt: skip
    matches(
        "launch-refusals",
        *((f"distrib-launch {words}", call(launch.main, *words.split(), cwd=tmp_path)) for words in commands),
    )


@pytest.mark.parametrize(
    ("name", "words", "end"),
    [
        pytest.param("run", "", "pass", marks=pytest.mark.forked),
        pytest.param("launch-failure", "", "raise ValueError('bad sample')", marks=pytest.mark.forked),
        pytest.param(
            "launch-killed", "", "print('last', flush=True); os.kill(os.getpid(), 9)", marks=pytest.mark.forked
        ),
        ("launch-hang", "--hang-timeout 3s ", "time.sleep(60)"),  # a fork's stack has the fork server's frames
    ],
)
@pytest.mark.processes
def test_output_of_a_run(tmp_path, matches, name, words, end):
    (tmp_path / "train.py").write_text(TRAINS.replace("{end}", end))
    command = f"distrib-launch -np 2 {words}--run-dir run train.py"
    done = subprocess.run(
        [LAUNCH.parent / command.split()[0], *command.split()[1:]],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    matches(name, (command, done), varies="times")


@pytest.mark.cluster
@pytest.mark.parametrize("name", ["launch-lost-host", "launch-interrupted"])
def test_output_of_a_run_that_is_ended_from_outside(tmp_path, hosts, matches, name):
    cluster = hosts()
    (tmp_path / "wait.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(60)\n")
    command = "distrib-launch -H hosts.txt --no-dedup --run-dir run wait.py"
    with cluster.popen("n1", [LAUNCH, *command.split()[1:]], cwd=tmp_path) as process:
        shown = sorted(process.stdout.readline() for _ in cluster.hosts)
        if name == "launch-interrupted":
            process.send_signal(signal.SIGINT)
        else:
            cluster.lose("n3")
        out, err = process.communicate(timeout=60)
    done = subprocess.CompletedProcess([], process.returncode, "".join(shown) + out, err)
    matches(name, (command, done), varies="times")


@pytest.mark.cluster
def test_output_of_check(tmp_path, hosts, matches):
    cluster = hosts()
    (tmp_path / "train.py").touch()
    runs = []
    for command in ("distrib-topo check -H hosts.txt train.py", "distrib-topo check -H n1,n2,n4 train.py"):
        runs.append((command, cluster.run("n1", [TOPO, *command.split()[1:]], cwd=tmp_path)))
    matches("check", *runs, varies="numbers")


@pytest.mark.cluster
@pytest.mark.prioritized
def test_output_of_probe(tmp_path, hosts, matches):
    cluster = hosts(rate="400mbit", rates={"n3": "100mbit"})
    command = "distrib-topo probe -H hosts.txt --quick --run-dir run"
    done = cluster.run("n1", [TOPO, *command.split()[1:]], cwd=tmp_path)
    matches("probe", (command, done), varies="numbers")
