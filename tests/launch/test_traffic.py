"""Traffic between the hosts of a job, captured at the switch: no secret in clear text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LAUNCH
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


@pytest.mark.parametrize("options", [["--mode", "sync"], ["--mode", "local"], ["--mode", "async", "--servers", "2"]])
def test_neither_the_token_nor_a_forwarded_value_crosses_the_network_in_clear(make_cluster, tmp_path, options):
    cluster = make_cluster(2)
    traffic, script = tmp_path / "traffic", tmp_path / "train.py"
    script.write_text(SCRIPT)
    capture = subprocess.Popen(
        ["ip", "netns", "exec", cluster.switch_namespace, sys.executable, "-c", CAPTURE, traffic],
        stdout=subprocess.PIPE,
    )
    try:
        assert capture.stdout and capture.stdout.readline()
        command = [
            LAUNCH,
            "-H",
            cluster.hostfile,
            "--run-dir",
            tmp_path / "run",
            "-x",
            "PLANTED_VALUE",
            *options,
            script,
        ]
        process = cluster.popen("n1", command, env={"PLANTED_VALUE": PLANTED, "OMP_NUM_THREADS": "1"})
        wait_for_line(process, f"trained with {len(PLANTED)}")
        agent = next(pid for pid, words in cluster.processes("n2").items() if "distrib_launch.rank_agent" in words)
        (token,) = re.findall(rb"DISTRIB_TOKEN=(\w+)", Path(f"/proc/{agent}/environ").read_bytes())
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
    finally:
        capture.kill()
        capture.communicate()
    seen = traffic.read_bytes()
    assert b"plain-output-of-rank" in seen  # the capture shows what is not encrypted
    assert token not in seen and PLANTED.encode() not in seen
