"""`run_script` runs a script as `python SCRIPT` does, and the process reports the exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from distrib_launch.rank_agent.script_process import RUN_SCRIPT
from tests.conftest import ROOT

pytestmark = pytest.mark.processes

SHOWS = """
from __future__ import print_function
import json, os, pickle, sys
class Here: pass
here = pickle.loads(pickle.dumps(Here()))
names = sorted(name for name in globals() if name not in ("__annotations__", "__conditional_annotations__"))
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, str(__package__), type(here).__module__, names]))
"""


def outputs(words: list[str], cwd: Path, **environment: str) -> list[subprocess.CompletedProcess[str]]:
    """Return the output of a script under Python itself and under `run_script`."""
    env = os.environ | environment
    commands = ([sys.executable, *words], [sys.executable, str(RUN_SCRIPT), *words])
    return [subprocess.run(one, cwd=cwd, env=env, capture_output=True, text=True, timeout=100) for one in commands]


@pytest.mark.parametrize(
    "words", [["sub/shows.py", "-m", "x"], ["-m", "sub.shows", "y"], ["sub/none.py"], ["-m", "none"]]
)
@pytest.mark.parametrize("environment", [{}, {"PYTHONSAFEPATH": "1"}])
def test_a_script_finds_what_python_itself_would_show_it(tmp_path, words, environment):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/shows.py").write_text(SHOWS)
    own, ours = outputs(words, tmp_path, **environment)
    assert (own.stdout.replace(f'"{tmp_path}/sub/shows.py"', '"sub/shows.py"'), own.returncode) == (
        ours.stdout.replace(f'"{tmp_path}/sub/shows.py"', '"sub/shows.py"'),
        ours.returncode,
    )
    assert bool(own.stderr) == bool(ours.stderr)


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "def f():\n    raise RuntimeError('a') from ValueError('b')\nf()",
        "print((1)",
        "raise SystemExit(7)",
        "import sys; sys.exit('a message')",
        "raise KeyboardInterrupt",
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.2), print(code))).start()\ncode = 5",
        "import multiprocessing as mp\ndef f(x): return x + 1\n"
        "if __name__ == '__main__':\n    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(f, [1]))",
    ],
)
def test_a_script_ends_as_it_would_by_itself(tmp_path, code):
    (tmp_path / "script.py").write_text(code + "\n")
    own, ours = outputs([str(tmp_path / "script.py")], tmp_path)
    assert (own.returncode, own.stdout, own.stderr) == (ours.returncode, ours.stdout, ours.stderr)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('boom\\nmore')", "RuntimeError: boom"),
        ("print((1)", "SyntaxError: '(' was never closed (script.py:1)"),
        ("import json; json.loads('{')", "json.decoder.JSONDecodeError: Expecting property name"),
        (
            "raise OSError('x: system error\\nncclSystemError: a call\\nLast error:\\nno space')",
            "OSError: x: system error: no space",
        ),
        (
            "class E(Exception):\n    hint = 'do that'\nraise E('file: no: one\\n  two; do that') from ValueError('inner')",
            "E: file: no: one; do that",
        ),
        ("import os\nif os.fork():\n    os.wait()\nelse:\n    1 / 0", ""),
        ("try:\n    1 / 0\nexcept ZeroDivisionError:\n    import sys; sys.exit(1)", ""),
    ],
)
def test_an_uncaught_exception_is_in_the_error_file(tmp_path, code, message):
    (tmp_path / "script.py").write_text(code + "\n")
    _, ours = outputs([str(tmp_path / "script.py")], tmp_path, TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    if not message:
        assert not (tmp_path / "error.json").exists(), ours
        return
    record = json.loads((tmp_path / "error.json").read_text())["message"]
    assert record["message"].startswith(message)
    assert record["extraInfo"]["py_callstack"] + "\n" == ours.stderr


TORCH = """
import torch, os
import torch.distributed as dist
rank = int(os.environ["RANK"])
{}
"""


@pytest.mark.parametrize(
    ("code", "warned"),
    [
        ("", True),
        ("dist.init_process_group('gloo'); dist.barrier(); dist.destroy_process_group()", False),
        ("if not rank: os._exit(0)", False),
        ("import distrib\nwith distrib.init(): pass", False),
        ("from mpi4py import MPI", False),
    ],
)
@pytest.mark.forked
def test_independent_copies_of_a_script_are_warned_of(launch, tmp_path, code, warned):
    (tmp_path / "script.py").write_text(TORCH.format(textwrap.dedent(code)))
    run = launch("-np", "2", tmp_path / "script.py")
    assert run.code == 0, run
    assert any("2 independent copies" in warning for warning in run.result["warnings"]) == warned, run
    assert ("2 independent copies" in "".join(run.err.splitlines()[-2:])) == warned


def test_names_that_run_script_looks_up_exist():
    import torch.distributed.distributed_c10d as c10d
    from mpi4py import MPI

    assert hasattr(c10d, "_default_pg_init_method") and callable(c10d.is_initialized)
    assert callable(MPI.Is_initialized) and callable(MPI.Is_finalized)
    assert (ROOT / "distrib/training/job.py").is_file()
