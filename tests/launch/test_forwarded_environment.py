"""Environment of ranks on several hosts: the launcher's on all of them, by one rule."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from distrib_launch.rank_agent import forwarding
from tests.conftest import ROOT

SCRIPT = """
import json, os
print(json.dumps({os.fsencode(name).hex(): os.fsencode(value).hex() for name, value in os.environ.items()}))
"""
OF_EACH_RANK = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "DISTRIB_PROCESS_TAG", "DISTRIB_ADDRESS", "DISTRIB_STATUS_FD", "TORCHELASTIC_ERROR_FILE",
}  # fmt: skip
ADDED = OF_EACH_RANK | {
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "DISTRIB_JOB", "DISTRIB_MODE", "DISTRIB_STRATEGY", "DISTRIB_DEVICE",
    "DISTRIB_RUN_DIR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "ACCELERATE_USE_CPU", "UCX_NET_DEVICES",
}  # fmt: skip


def decoded(line: str) -> dict[str, str]:
    return {os.fsdecode(bytes.fromhex(n)): os.fsdecode(bytes.fromhex(v)) for n, v in json.loads(line).items()}


@pytest.mark.cluster
def test_all_ranks_have_the_environment_of_python_and_documented_variables(make_cluster, launch, tmp_path, monkeypatch):
    """Variables of libraries, of any name, bytes and size are the same on two hosts; one host's login files add none."""
    cluster = make_cluster(
        2, slots=2, login_environment={"ONLY_ON_ONE_HOST": "x", "NCCL_ALGO": "Tree", "PATH": "/bin:/usr/bin"}
    )
    script = tmp_path / "environment.py"
    script.write_text(SCRIPT)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    given = {
        "OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no", "SOME_LIBRARY_OPTION": "a b'c\"d $HOME `id`\nü", "dotted.name": "1",
        "LATIN": os.fsdecode(b"caf\xe9"), "EMPTY": "", "LONG": "l" * 120_000, "LONGER": os.fsdecode(b"\xe9" * 60_000),
        "PYTHONPATH": str(tmp_path), "LC_ALL": "C.UTF-8", "SERVICE_TOKEN": "planted-value", "DISPLAY": ":7", "OMPI_MCA_coll_base_verbose": "0",
    }  # fmt: skip
    plain = subprocess.run([sys.executable, script], env=os.environ | given, capture_output=True, text=True, check=True)
    run = launch("-H", cluster.hostfile, script, cluster=cluster, env=given)
    assert run.code == 0, run
    seen = [decoded((run.run_dir / f"ranks/{rank}.out").read_text()) for rank in range(4)]
    own = {name for env in seen for name in env if forwarding.belongs_to_host(name)}
    alone = decoded(plain.stdout)
    alone = {
        name: alone[name] for name in alone if not (forwarding.belongs_to_host(name) or name.startswith("DISTRIB_"))
    }
    for rank, env in enumerate(seen):
        assert env["RANK"] == str(rank)
        assert set(env) - own - set(alone) == ADDED, rank
        assert {name: env.get(name) for name in alone} == alone, rank
        common = {name for name in env if name not in OF_EACH_RANK | own}
        assert {name: env[name] for name in common} == {name: seen[0][name] for name in common}, rank
        assert env["OMPI_MCA_coll_base_verbose"] == "0"
    assert [env.get("DISPLAY") for env in seen] == [":7", ":7", None, None]
    for path in filter(lambda path: path.is_file() and path.suffix != ".out", run.run_dir.rglob("*")):
        text = path.read_bytes()
        assert b"planted-value" not in text and b"SOME_LIBRARY_OPTION" not in text, path


def test_the_reference_lists_the_variables_that_stay_with_a_host():
    words = set(re.findall(r"`([A-Z0-9_]+\*?)`", (ROOT / "docs/reference/environment.md").read_text()))
    assert words >= forwarding.HOST_VARIABLES and {f"{prefix}*" for prefix in forwarding.HOST_PREFIXES} <= words


def environment_of(
    own: dict[str, str], launcher: dict[str, str], chosen: dict[str, str], **options: object
) -> dict[str, str]:
    options = {"interpreter": sys.executable, "has_transport": False} | options
    return forwarding.script_environment(own | forwarding.encode_environment(launcher, chosen, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            {
                "PATH": "/launcher",
                "CONDA_PREFIX": "/c",
                "HOME": "/own",
                "PYTHONPATH": "/p",
                "SLURM_PROCID": "1",
                "TMPDIR": "/x",
            },
        ),
        (
            {"interpreter": "/other/python"},
            {"PATH": "/own", "HOME": "/own", "PYTHONPATH": "/p", "SLURM_PROCID": "1", "TMPDIR": "/x"},
        ),
        ({"has_transport": True}, {"PATH": "/own", "HOME": "/own", "OWN": "1", "SLURM_PROCID": "1", "TMPDIR": "/x"}),
    ],
    ids=["one interpreter", "an interpreter of its own", "srun"],
)
def test_variables_of_a_host_keep_its_values_and_chosen_ones_win(options, expected):
    own = {"HOME": "/own", "PATH": "/own", "OWN": "1", "SLURM_PROCID": "1", "DISTRIB_TOKEN": "t", "TMPDIR": "/own"}
    launcher = {
        "HOME": "/launcher", "PATH": "/launcher", "CONDA_PREFIX": "/c", "PYTHONPATH": "/p", "SSH_TTY": "/dev/pts/1", "DISTRIB_RUN_DIR": "/r",
        "KUBERNETES_PORT": "1", "BASH_FUNC_module%%": "() { :; }", "SLURM_JOB_ID": "7",
    }  # fmt: skip
    assert environment_of(own, launcher, {"TMPDIR": "/x"}, **options) == expected


def test_an_open_mpi_away_from_the_interpreter_is_found_last():
    found = environment_of({"PMIX_PREFIX": "/opt/mpi"}, {"LD_LIBRARY_PATH": "/mine"}, {})
    assert found["LD_LIBRARY_PATH"] == "/mine:/opt/mpi/lib"
    assert "LD_LIBRARY_PATH" not in environment_of({"PMIX_PREFIX": sys.prefix}, {}, {})
