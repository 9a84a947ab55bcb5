"""`distrib-topo probe` while silent connections wait on all ports of its processes."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time

import pytest

from distrib.probe.bench import tcp
from tests.conftest import TOPO

IDLER = """
import glob, os, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (20000, 20000))
seen, held = set(), []

def owner(inode):  # the newest processes first
    for pid in sorted(filter(str.isdigit, os.listdir("/proc")), key=int, reverse=True):
        for link in glob.glob(f"/proc/{pid}/fd/*"):
            try:
                if os.readlink(link) == f"socket:[{inode}]":
                    return open(f"/proc/{pid}/cmdline").read()
            except OSError:
                pass
    return ""

while True:
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        fields = line.split()
        host, port = fields[1].split(":")
        if fields[3] == "0A" and port not in seen and (command := owner(fields[9])):
            seen.add(port)
            if "python" not in command.split(chr(0))[0]:  # Open MPI's own processes do not survive this
                continue
            address = ".".join(str(int(host[at : at + 2], 16)) for at in (6, 4, 2, 0))
            for _ in range(int(sys.argv[1])):
                sock = socket.socket()
                sock.setblocking(False)
                held.append(sock)
                sock.connect_ex((address, int(port, 16)))
            print(len(held), flush=True)
    time.sleep(0.01)
"""


def test_connections_without_the_token_neither_join_a_test_nor_delay_it():
    token, task = b"t" * tcp.TOKEN_BYTES, 7
    listener = tcp.ProbeListener("127.0.0.1")
    place = "127.0.0.1", listener.port
    hello = tcp._HELLO.pack(token, task, 0)
    hostile = [b"", b"x", hello[:-1], b"x" * 1000, b"x" + hello, hello[:16] + b"\xff" * 12, tcp._HELLO.pack(b"w" * 16, task, 0),
               tcp._HELLO.pack(token, task + 1, 0), tcp._HELLO.pack(token, task, 2)]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for data in hostile * 40:
            sock = stack.enter_context(socket.create_connection(place))
            sock.sendall(data)
        started = time.monotonic()
        made = tcp.connect_streams("127.0.0.1", place, token, task, 2, started + 5)
        accepted = listener.accept(token, task, 2, started + 5)
        assert time.monotonic() - started < 2
        assert [sock.getpeername() for sock in accepted] == [sock.getsockname() for sock in made]
        for end in (*made, *accepted, listener.socket):
            end.close()


@pytest.mark.cluster
@pytest.mark.forked
def test_all_links_are_measured_while_silent_connections_wait_on_every_port(make_cluster, tmp_path):
    cluster = make_cluster(2, rate="400mbit")
    with contextlib.ExitStack() as stack:
        idlers = [cluster.popen(host, [sys.executable, "-c", IDLER, "500"], cwd=tmp_path) for host in cluster.hosts]
        for idler in idlers:
            stack.callback(idler.communicate)
            stack.callback(idler.kill)
        command = [TOPO, "probe", "-H", cluster.hostfile, "--json", "--run-dir", tmp_path / "run"]
        done = cluster.run("n1", command, env={"OMP_NUM_THREADS": "1"}, timeout=200, cwd=tmp_path)
        outputs = []
        for idler in idlers:
            idler.kill()
            outputs.append(idler.communicate()[0])
    assert done.returncode == 0, done.stderr
    assert "no connection came" not in (tmp_path / "run/records.jsonl").read_text()
    output = json.loads(done.stdout)
    assert output["whole"] is True and len(output["measured"]["pairs"]) >= 2, output
    assert all(pair["bandwidth_bytes_per_second"] for pair in output["measured"]["pairs"])
    assert all(int(lines.split()[-1]) >= 500 for lines in outputs)
