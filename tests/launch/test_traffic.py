"""Traffic between the hosts of a job, captured at the switch: no secret in clear text."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import LAUNCH, TOPO
from tests.launch.test_launch_cluster import wait_for_line

pytestmark = pytest.mark.processes

CAPTURE = """
import socket, sys
sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
print("captures", flush=True)
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.write(sock.recv(1 << 16))
"""
SCRIPT = """
import os, time
import torch, distrib
with distrib.init() as job:
    model = torch.nn.Linear(4, 1)
    model, optimizer = job.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
    for _ in range(8):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained with", len(os.environ["PLANTED_VALUE"]), "plain-output-of-rank", flush=True)
    time.sleep(1)
"""
PLANTED = "planted-7d1f04c2-value-of-this-test-only"


@contextlib.contextmanager
def captured_traffic(cluster, file):
    """Capture the traffic between the hosts in a file."""
    capture = subprocess.Popen(
        ["ip", "netns", "exec", cluster.switch_namespace, sys.executable, "-c", CAPTURE, file], stdout=subprocess.PIPE
    )
    try:
        assert capture.stdout and capture.stdout.readline()
        yield
    finally:
        capture.kill()
        capture.communicate()


def token_of_job(cluster) -> bytes:
    """Return the token from the environment of a rank agent on n2, as soon as one runs. The environment has the planted value."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid, words in cluster.processes("n2").items():
            with contextlib.suppress(OSError):
                if "distrib_launch.rank_agent" in words:
                    environ = Path(f"/proc/{pid}/environ").read_bytes()
                    assert PLANTED.encode() in environ
                    return re.findall(rb"DISTRIB_TOKEN=(\w+)", environ)[0]
        time.sleep(0.05)
    raise AssertionError("no rank agent started")


@pytest.mark.parametrize("options", [["--mode", "sync"], ["--mode", "local"], ["--mode", "async", "--servers", "2"]])
def test_neither_the_token_nor_a_forwarded_value_crosses_the_network_in_clear(make_cluster, tmp_path, options):
    cluster = make_cluster(2)
    traffic, script = tmp_path / "traffic", tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [LAUNCH, "-H", cluster.hostfile, "--run-dir", tmp_path / "run", "-x", "PLANTED_VALUE", *options, script]
    with captured_traffic(cluster, traffic):
        process = cluster.popen("n1", command, env={"PLANTED_VALUE": PLANTED, "OMP_NUM_THREADS": "1"})
        wait_for_line(process, f"trained with {len(PLANTED)}")
        token = token_of_job(cluster)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    seen = traffic.read_bytes()
    assert b"plain-output-of-rank" in seen  # the capture shows what is not encrypted
    assert token not in seen and PLANTED.encode() not in seen


def test_a_probe_sends_neither_the_token_nor_a_forwarded_value_in_clear(make_cluster, tmp_path):
    cluster = make_cluster(2, rate="100mbit")
    traffic = tmp_path / "traffic"
    command = [TOPO, "probe", "-H", cluster.hostfile, "--quick", "--run-dir", tmp_path / "run"]
    with captured_traffic(cluster, traffic):
        process = cluster.popen("n1", command, env={"WANDB_API_KEY": PLANTED, "OMP_NUM_THREADS": "1"}, cwd=tmp_path)
        token = token_of_job(cluster)
        _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    seen = traffic.read_bytes()
    assert b"bandwidth_bytes_per_second" in seen
    assert token not in seen and PLANTED.encode() not in seen
