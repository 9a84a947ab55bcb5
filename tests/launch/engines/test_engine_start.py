"""Start of the engine: other MPIs, failed starts, too few ranks."""

from __future__ import annotations

import os

import pytest

from tests.conftest import JOB, LAUNCH


def test_mpirun_ignores_the_slots_of_slurm(launch):
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOBID": "7",
        "SLURM_NODELIST": os.uname().nodename,
        "SLURM_TASKS_PER_NODE": "1",
    }
    run = launch("-H", "localhost:2", JOB, env=slurm)
    assert run.code == 0 and run.result["world_size"] == 2, run


def test_fewer_ranks_than_planned_are_refused(launch, tmp_path):
    """A job never runs silently on fewer ranks than planned. Here a runtime starts two of four."""
    folder = tmp_path / "site/bin"
    folder.mkdir(parents=True)
    mpirun = folder / "mpirun"
    mpirun.write_text(
        "#!/usr/bin/env python3\nimport os, sys\nwords = sys.argv[1:]\nwords[words.index('-np') + 1] = '2'\n"
        f"words[words.index('--prefix') + 1] = {str(LAUNCH.parent.parent)!r}\n"
        f"os.execv({str(LAUNCH.parent / 'mpirun')!r}, ['mpirun', *words])\n"
    )
    mpirun.chmod(0o755)
    run = launch("-np", "4", "--mpirun", mpirun, JOB)
    assert run.code == 1, run
    assert "started 2 ranks, but the plan has 4" in run.err
    assert "done" not in run.out


def test_an_engine_that_starts_no_rank_is_reported_with_its_output(launch, tmp_path):
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho no licence today >&2\nexit 0\n")
    mpirun.chmod(0o755)
    run = launch("-np", "2", "--mpirun", mpirun, JOB)
    assert run.code == 1, run
    assert "the job did not start" in run.err
    assert "no licence today" in run.err


def test_a_start_that_fails_in_the_pmix_listener_is_repeated_once(launch, tmp_path):
    mpirun, failed = tmp_path / "mpirun", tmp_path / "failed"
    real = LAUNCH.parent / "mpirun"
    mpirun.write_text(
        f'#!/bin/sh\n[ -e {failed} ] && shift 2 && exec {real} --prefix {real.parent.parent} "$@"\n'  # another --prefix
        f'touch {failed}\nprintf "The PMIx server\'s listener thread failed to start. We cannot\\ncontinue.\\n" >&2\nexit 1\n'
    )
    mpirun.chmod(0o755)
    run = launch("-np", "2", "--mpirun", mpirun, JOB)
    assert run.code == 0, run
    assert run.err.count("trying once more") == 1


@pytest.mark.parametrize(
    ("words", "whose"),
    [
        ("[mpiexec@n1] match_arg (hydra/lib/utils/args.c:166): unrecognized argument prefix", "MPICH's"),  # MPICH 5.0.2
        ("mpirun: Error: unknown option \"--prtemca\"\nType 'mpirun --help' for usage.", "older Open MPI"),  # 4.1.4
    ],
)
def test_an_mpirun_of_another_mpi_is_recognized(launch, tmp_path, words, whose):
    other = tmp_path / "mpirun"
    other.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}\nEND\nexit 1\n")
    other.chmod(0o755)
    run = launch("-np", "2", "--mpirun", other, JOB)
    assert run.code == 1
    assert whose in run.err
    assert "not that of Open MPI 5" in run.err
    assert "leave --mpirun out" in run.err
