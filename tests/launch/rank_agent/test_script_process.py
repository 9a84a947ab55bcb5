"""Settings of a host that the rank agent adds to the environment of a script."""

from __future__ import annotations

import pytest

from distrib_launch.rank_agent import script_process


@pytest.mark.parametrize(
    ("devices", "environ", "transports"),
    [
        ([], {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "^ofi"),
        (["mlx5_0"], {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, None),
        ([], {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_btl": "self,tcp"}, "self,tcp"),
        ([], {"SLURM_NTASKS_PER_NODE": "2"}, None),
    ],
)
def test_open_mpi_skips_the_rdma_transport_where_no_device_can_use_it(
    tmp_path, monkeypatch, devices, environ, transports
):
    for name in devices:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(script_process, "RDMA_DEVICES", (tmp_path, tmp_path / "missing"))
    script_process._skip_unused_transport(environ)
    assert environ.get("OMPI_MCA_btl") == transports
