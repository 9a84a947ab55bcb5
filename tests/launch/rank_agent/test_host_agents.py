"""One Python process forks the agents of a host; where it may not, each rank starts its own."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

from distrib_launch.rank_agent.host_agents import SHELL_SCRIPT

AGENT = """
import os, sys
from distrib_launch.rank_agent import host_agents, reaper
folder, is_detached = host_agents.take_options()
environ = os.environ
if folder:
    _, environ = host_agents.fork_agents(folder, reaper.HostGuard(), is_detached=is_detached)
line = f"{environ['OMPI_COMM_WORLD_LOCAL_RANK']} {environ['MARK']} {os.getppid()}\\n"
os.write(1, line.encode())
sys.exit(environ["MARK"] == "fails")
"""


def run(attempt: str, marks: list[str]) -> tuple[list[int], list[list[str]]]:
    """Start a shell for each rank, as PRRTE does; return their exit codes, and the lines of all agents in order."""
    ranks = [
        subprocess.Popen(
            ["sh", "-c", SHELL_SCRIPT, attempt, sys.executable, "-c", AGENT],
            env={
                **os.environ,
                "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
                "OMPI_COMM_WORLD_LOCAL_SIZE": str(len(marks)),
                "MARK": mark,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, mark in enumerate(marks)
    ]
    printed = "".join(rank.communicate(timeout=60)[0] for rank in ranks)
    return [rank.returncode for rank in ranks], sorted(line.split() for line in printed.splitlines())


def test_all_agents_come_from_one_process_and_have_the_environments_of_their_ranks():
    attempt = uuid.uuid4().hex
    codes, lines = run(attempt, ["zero", "one", "two", "three"])
    assert codes == [0, 0, 0, 0]
    assert [line[:2] for line in lines] == [["0", "zero"], ["1", "one"], ["2", "two"], ["3", "three"]]
    assert len({line[2] for line in lines}) == 1
    assert not list(Path("/tmp").glob(f"distrib-{attempt}*"))


def test_the_engine_sees_that_an_agent_failed():
    codes, _ = run(uuid.uuid4().hex, ["works", "fails", "works"])
    assert codes == [0, -15, 0]


def test_a_folder_that_is_a_link_of_another_user_is_not_used(tmp_path):
    attempt = uuid.uuid4().hex
    link = Path(f"/tmp/distrib-{attempt}.{os.getpid()}")
    link.symlink_to(tmp_path)
    try:
        codes, lines = run(attempt, ["zero", "one"])
    finally:
        link.unlink()
    assert codes == [0, 0]
    assert [line[:2] for line in lines] == [["0", "zero"], ["1", "one"]]
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_alone_on_its_host_needs_no_folder():
    attempt = uuid.uuid4().hex
    codes, lines = run(attempt, ["zero"])
    assert codes == [0]
    assert lines == [["0", "zero", str(os.getpid())]]
    assert not list(Path("/tmp").glob(f"distrib-{attempt}*"))
