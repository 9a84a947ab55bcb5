"""Build, installation and import cost of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import grimp
import pytest

from distrib.errors import ConfigError
from distrib.utils.plotting import check_plot_path
from tests.conftest import ROOT

FOLDERS = {"distrib": "distrib", "distrib_launch": "launch/distrib_launch"}
COPIED = ("pyproject.toml", "README.md", "LICENSE", "distrib", "launch")


def files_on_disk() -> set[str]:
    return {
        str(Path(package, path.relative_to(ROOT / folder)))
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def build(source: Path, target: Path, kind: str) -> Path:
    code = f"from setuptools.build_meta import {kind} as build; print(build({str(target)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.strip().splitlines()[-1]


def install(wheel: Path, folder: Path) -> Path:
    """Install only a wheel into a virtual environment that uses this environment's other packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=200)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
    subprocess.run(pip, check=True, timeout=200, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"})
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def where_installed(commands: Path, elsewhere: Path) -> str:
    """Run both commands, and return the path from which the launcher is loaded."""
    for command in ("distrib-launch", "distrib-topo"):
        told = subprocess.run([str(commands / command), "--help"], cwd=elsewhere, capture_output=True, text=True)
        assert told.returncode == 0, told.stderr
        assert command in told.stdout
    code = (
        "import os, distrib_launch.rank_agent.agent, distrib_launch.engines.mpirun, distrib.cluster.hostfile; "
        "print(os.path.dirname(distrib_launch.__file__))"
    )
    python = [str(commands / "python"), "-c", code]
    done = subprocess.run(python, cwd=elsewhere, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.processes
def test_the_wheel_holds_every_module_and_runs(source, tmp_path):
    wheel = build(source, tmp_path, "build_wheel")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == files_on_disk()
    commands = install(wheel, tmp_path / "venv")
    assert where_installed(commands, tmp_path).startswith(str(tmp_path / "venv"))


@pytest.mark.processes
def test_the_editable_install_runs(source, tmp_path):
    commands = install(build(source, tmp_path, "build_editable"), tmp_path / "venv")
    assert where_installed(commands, tmp_path) == str(source / "launch/distrib_launch")


@pytest.mark.processes
def test_importing_loads_no_torch_and_is_quick(tmp_path):
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # the first import writes the bytecode
    for module in ("distrib", "distrib_launch", "distrib_launch.cli.launch", "distrib_launch.rank_agent.agent"):
        code = (
            f"import sys, time; begun = time.process_time(); import {module}; took = time.process_time() - begun; "
            "heavy = {'torch', 'numpy', 'mpi4py'} & set(sys.modules); print(took, *heavy)"
        )
        python = [sys.executable, "-c", code]
        runs = [subprocess.run(python, capture_output=True, text=True, check=True, env=environment) for _ in range(3)]
        assert not any(done.stdout.split()[1:] for done in runs), (module, runs)
        assert min(float(done.stdout.split()[0]) for done in runs) < 0.4, module  # idle: 0.06 s; torch takes seconds


@pytest.mark.processes
def test_an_interrupt_while_the_command_is_imported_is_no_traceback():
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'distrib_launch.cli.launch':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from distrib_launch.cli.main import main\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "distrib-launch: error: interrupted\n")


def import_cycles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Return groups of modules that import each other, directly or indirectly (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in order:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], order[imported])
        if low[module] == order[module]:
            start = stack.index(module)
            if len(stack) - start > 1:
                cycles.append(sorted(stack[start:]))
            del stack[start:]

    for module in graph.modules:
        if module not in order:
            visit(module)
    return cycles


def test_no_import_cycles_also_by_imports_inside_functions():
    cycles = import_cycles(
        grimp.build_graph("distrib", "distrib_launch", cache_dir=None, exclude_type_checking_imports=True)
    )
    assert cycles == []


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"distrib\[plot\]"):
        check_plot_path("a.svg")
