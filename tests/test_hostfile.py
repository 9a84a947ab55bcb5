"""Hostfiles and host lists of every dialect, valid and invalid, as tables; properties that hold for any text."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distrib.cluster.hostfile import (
    DIALECTS,
    Host,
    HostfileDialect,
    HostList,
    format_hostfile,
    parse_host_list,
    parse_hostfile,
    read_hostfile,
    slurm_hosts,
)
from distrib.cluster.hosts import Notes, SourcePlace
from distrib.cluster.slurm import gpus_per_host
from distrib.errors import HostfileError

EXAMPLES = Path(__file__).parents[1] / "hostfiles"


def h(name: str, slots: int | None = None, line: int = 1, **settings: Any) -> Host:
    return Host(name=name, slots=slots, line=line, **settings)


GOOD_FILES: list[tuple[str, str, list[Host]]] = [
    # Names only.
    ("plain", "node1", [h("node1")]),
    ("plain", "node1\nnode2\n", [h("node1"), h("node2", line=2)]),
    ("plain", "\n\n  node1  \n\n", [h("node1", line=3)]),
    ("plain", "gpu-7.rack_2.example.org", [h("gpu-7.rack_2.example.org")]),
    ("plain", "node1.example.org.", [h("node1.example.org.")]),
    ("plain", "10.0.0.7", [h("10.0.0.7")]),
    ("plain", "3com", [h("3com")]),
    ("plain", "[::1]", [h("::1")]),
    ("plain", "fe80::7", [h("fe80::7")]),
    ("plain", "[fe80::7%eth0]", [h("fe80::7%eth0")]),
    ("plain", "bob@node1", [h("node1", user="bob")]),
    ("plain", "bob@[::1]", [h("::1", user="bob")]),
    ("plain", "bob.b-2_x+y@node1", [h("node1", user="bob.b-2_x+y")]),
    # Blanks, line endings, comments with `#`.
    ("plain", "\ufeffnode1", [h("node1")]),
    ("plain", "node1\r\nnode2\r\n", [h("node1"), h("node2", line=2)]),
    ("plain", "node1\rnode2", [h("node1"), h("node2", line=2)]),
    ("plain", "node1\t \nnode2\u00a0\n", [h("node1"), h("node2", line=2)]),
    ("plain", "# my hosts\nnode1 # the fast one\n#node2\n", [h("node1", line=2)]),
    ("plain", "node1#no blank before", [h("node1")]),
    # Open MPI and PRRTE.
    ("openmpi", "node1 slots=8", [h("node1", 8)]),
    ("openmpi", "node1 slots = 8", [h("node1", 8)]),
    ("openmpi", "node1\tslots\t=\t8\t", [h("node1", 8)]),
    ("openmpi", "node1 slots=08", [h("node1", 8)]),
    ("openmpi", "node1 slots=1\nnode2", [h("node1", 1), h("node2", line=2)]),
    ("openmpi", "node1 slots=8 max_slots=16", [h("node1", 8, max_slots=16)]),
    ("openmpi", "node1 max_slots=16 slots=8", [h("node1", 8, max_slots=16)]),
    ("openmpi", "node1 slots=8 max_slots=8", [h("node1", 8, max_slots=8)]),
    ("openmpi", "node1 max_slots=16", [h("node1", max_slots=16)]),
    ("openmpi", "node1 cpu=8", [h("node1", 8)]),
    ("openmpi", "node1 count=8", [h("node1", 8)]),
    *(
        ("openmpi", f"node1 slots=8 {alias}=9", [h("node1", 8, max_slots=9)])
        for alias in ("slots-max", "slots_max", "max-slots", "cpu-max", "max_cpu", "count_max", "max-count")
    ),
    ("openmpi", "bob@node1 slots=8", [h("node1", 8, user="bob")]),
    ("openmpi", "node1 slots=8 username=bob", [h("node1", 8, user="bob")]),
    ("openmpi", 'node1 slots=8 user-name="bob"', [h("node1", 8, user="bob")]),
    ("openmpi", "10.0.0.7 slots=8", [h("10.0.0.7", 8)]),
    ("openmpi", "[2001:db8::7] slots=8", [h("2001:db8::7", 8)]),
    ("openmpi", "2001:db8::a slots=8", [h("2001:db8::a", 8)]),
    ("openmpi", "// my hosts\nnode1", [h("node1", line=2)]),
    ("openmpi", "node1 slots=8//eight", [h("node1", 8)]),
    ("openmpi", "node1 /* fast */ slots=8", [h("node1", 8)]),
    ("openmpi", "/* node1\nnode2 */ node3\n", [h("node3", line=2)]),
    ("openmpi", "node1 /* one\r\ntwo\r\n*/ node2", [h("node1"), h("node2", line=3)]),
    ("openmpi", "/***/node1/**/\n", [h("node1")]),
    ("openmpi", "node1\nnode1", [h("node1", 2)]),
    ("openmpi", "a\nb\na\na\n", [h("a", 3), h("b", line=2)]),
    ("openmpi", "node1\nNODE1", [h("node1", 2)]),
    ("openmpi", "a max_slots=2\na max_slots=2", [h("a", 2, max_slots=2)]),
    # MPICH.
    ("mpich", "node1:8", [h("node1", 8)]),
    ("mpich", "node1:8\nnode2", [h("node1", 8), h("node2", line=2)]),
    ("mpich", "node1:8 # fast", [h("node1", 8)]),
    ("mpich", "node1:8 user=bob", [h("node1", 8, user="bob")]),
    ("mpich", "node1 user=bob", [h("node1", user="bob")]),
    ("mpich", "node1:8 binding=user:0,1,2", [h("node1", 8)]),
    ("mpich", "node1 binding=rr", [h("node1")]),
    ("mpich", "10.0.0.7:8", [h("10.0.0.7", 8)]),
    ("mpich", "[::1]:8", [h("::1", 8)]),
    ("mpich", "bob@[fe80::7%eth0]:8", [h("fe80::7%eth0", 8, user="bob")]),
    ("mpich", "node1:22", [h("node1", 22)]),
    ("mpich", "node1:8\r\n", [h("node1", 8)]),
    # DeepSpeed and Horovod.
    ("openmpi", "worker-1 slots=4\nworker-2 slots=4\n", [h("worker-1", 4), h("worker-2", 4, line=2)]),
    ("openmpi", "# DeepSpeed\n\nworker-1 slots=4", [h("worker-1", 4, line=3)]),
    ("horovod", "a:4,b:4", [h("a", 4), h("b", 4)]),
    ("horovod", "a:4, b:4 ,c", [h("a", 4), h("b", 4), h("c")]),
    ("mpich", "a:4\nb:2\n", [h("a", 4), h("b", 2, line=2)]),
    # Ranges and Slurm's lists.
    ("slurm", "n[1-3,7]", [h("n1"), h("n2"), h("n3"), h("n7")]),
    ("slurm", "n[1-2],login,m[08-10]", [h("n1"), h("n2"), h("login"), h("m08"), h("m09"), h("m10")]),
    ("slurm", "n[3,1-2]", [h("n3"), h("n1"), h("n2")]),
    ("slurm", "r[1-2]n[3,1]", [h("r1n3"), h("r1n1"), h("r2n3"), h("r2n1")]),
    ("slurm", "n[1-5/2]-ib.example.org", [h(f"n{i}-ib.example.org") for i in (1, 3, 5)]),
    ("slurm", "n[007]", [h("n007")]),
    ("slurm", "10.0.0.[9-10]", [h("10.0.0.9"), h("10.0.0.10")]),
    ("slurm", "bob@n[1-2]", [h("n1", user="bob"), h("n2", user="bob")]),
    ("slurm", "a,b", [h("a"), h("b")]),
    ("slurm", "n[1-3]\nn2", [h("n1"), h("n2", 2), h("n3")]),
    ("openmpi", "gpu[01-16] slots=8", [h(f"gpu{i:02}", 8) for i in range(1, 17)]),
    ("openmpi", "n[1-2],m slots=8 port=2222", [h(n, 8, port=2222) for n in ("n1", "n2", "m")]),
    ("mpich", "n[1-2]:8", [h("n1", 8), h("n2", 8)]),
    ("horovod", "n[1-2]:8,m:4", [h("n1", 8), h("n2", 8), h("m", 4)]),
    # Settings of our own.
    ("plain", "node1 port=2222", [h("node1", port=2222)]),
    ("plain", "node1 port=65535", [h("node1", port=65535)]),
    ("plain", "node1 role=server", [h("node1", role="server")]),
    ("plain", "node1 role=worker", [h("node1")]),
    ("plain", "node1 python=/usr/bin/python3", [h("node1", python="/usr/bin/python3")]),
    ("plain", "node1 python=/usr//bin/*/a#b", [h("node1", python="/usr//bin/*/a#b")]),
    ("plain", 'node1 python="/my envs/x=1/python"', [h("node1", python="/my envs/x=1/python")]),
    ("plain", "node1 python=/опт/python", [h("node1", python="/опт/python")]),
    (
        "openmpi",
        "node1 slots=8 user=bob port=22 python=/p role=server",
        [h("node1", 8, user="bob", port=22, python="/p", role="server")],
    ),
    # Several dialects in one file.
    ("mixed", "a slots=4\nb:4", [h("a", 4), h("b", 4, line=2)]),
    ("mixed", "a:4 max_slots=8", [h("a", 4, max_slots=8)]),
    ("mixed", "// ours\na:4", [h("a", 4, line=2)]),
]

# text, line, column, a part of the message
BAD_FILES: list[tuple[str, int, int, str]] = [
    # No hosts.
    ("", 0, 0, "no hosts"),
    (" \n\t\r\n", 0, 0, "no hosts"),
    ("# node1\n// node2\n/* node3 */", 0, 0, "no hosts"),
    ("\ufeff", 0, 0, "no hosts"),
    # Invalid slots.
    ("node1 slots=0", 1, 13, "whole number from 1"),
    ("node1 slots=2,node2 slots=2", 1, 13, "did not expect a comma in '2,node2'; write one host a line"),
    ("node1 slots=-1", 1, 13, "'-1'"),
    ("node1 slots=+4", 1, 13, "'+4'"),
    ("node1 slots=four", 1, 13, "'four'"),
    ("node1 slots=4.0", 1, 13, "'4.0'"),
    ("node1 slots=1_000", 1, 13, "'1_000'"),
    ("node1 slots=٣", 1, 13, "'٣'"),
    ("node1 slots=0x8", 1, 13, "'0x8'"),
    ("node1 slots=4,5", 1, 13, "'4,5'"),
    ("node1 slots=" + "9" * 5000, 1, 13, "whole number from 1 to 100000"),
    ("node1 slots=100001", 1, 13, "from 1 to 100000"),
    ("node1 max_slots=0", 1, 17, "max_slots must be"),
    ("ok\nnode1 slots=8 max_slots=4", 2, 1, "max_slots=4 is less than the 8 slots"),
    ("node1:8 max_slots=4", 1, 1, "max_slots=4 is less"),
    ("a max_slots=1\na max_slots=1", 1, 1, "named 2 times but has max_slots=1"),
    ("node1:0", 1, 7, "whole number from 1"),
    ("node1:-4", 1, 7, "'-4'"),
    ("node1:", 1, 7, "not ''"),
    ("node1:x", 1, 7, "'x'"),
    ("a:4:4", 1, 3, "'4:4'"),
    ("[::1]:x", 1, 7, "'x'"),
    ("node1:4 slots=4", 1, 1, "slots are given twice"),
    # Settings.
    ("node1 slts=4", 1, 7, "did you mean slots?"),
    ("node1 Slots=4", 1, 7, "did you mean slots?"),
    ("node1 max_slot=4", 1, 7, "did you mean max_slots?"),
    ("node1 pythn=/p", 1, 7, "did you mean python?"),
    ("node1 prot=22", 1, 7, "did you mean port?"),
    ("# a\n\nnode1 slots=4 colour=red", 3, 15, "unknown setting 'colour'; known are slots"),
    ("node1 slots=4 cpu=4", 1, 15, "slots is given twice"),
    ("node1 port=1 port=1", 1, 14, "port is given twice"),
    ("node1 slots=", 1, 12, "'slots' has no value"),
    ("node1 slots= port=22", 1, 12, "'slots' has no value"),
    ("node1 slots==4", 1, 12, "'slots' has no value"),
    ("node1 slots=4 4", 1, 15, "did not expect '4'"),
    ("node1 slots=4 fast", 1, 15, "did not expect 'fast'"),
    ("node1 8", 1, 7, "slots=8"),
    ("node1 slots", 1, 7, "did not expect 'slots'"),
    ("node1 node2", 1, 7, "a comma between hosts"),
    ("slots=4", 1, 1, "no host before 'slots'="),
    ("= 4", 1, 1, "no host before"),
    ("node1 port=0", 1, 12, "port must be"),
    ("node1 port=65536", 1, 12, "from 1 to 65535"),
    ("node1 role=master", 1, 12, "worker or server"),
    ("node1 python=python3", 1, 14, "absolute path"),
    ("node1 python=~/bin/python", 1, 14, "absolute path"),
    ('node1 python=/a"b', 1, 14, "characters"),
    ('node1 python="/a\x1bb"', 1, 14, "characters"),
    # Users.
    ("bob@node1 user=ann", 1, 1, "the user is given twice"),
    ("@node1", 1, 1, "'' is not a user name"),
    ("-oProxyCommand=x@node1", 1, 1, "no host before"),
    ("-l@node1", 1, 1, "not a user name"),
    ("node1 user=-l", 1, 12, "not a user name"),
    ("node1 user=a;reboot", 1, 12, "not a user name"),
    ("node1 user=$(id)", 1, 12, "not a user name"),
    ('node1 user="a b"', 1, 12, "not a user name"),
    ("a@b@node1", 1, 1, "'a@b' is not a user name"),
    # Host names.
    ("ok\n-node1", 2, 1, "ssh would take it for an option"),
    ("bob@-node1", 1, 5, "ssh would take it for an option"),
    ("[-1]", 1, 2, "not a range"),
    ("node1;reboot", 1, 1, "not a host name"),
    ("node$(id)", 1, 1, "not a host name"),
    ("nöde1", 1, 1, "xn--"),
    ("node\u200b1", 1, 1, "\\u200b"),
    (".node1", 1, 1, "not a host name"),
    ("a..b", 1, 1, "not a host name"),
    ("a" * 254, 1, 1, "at most 253"),
    ('"node1"', 1, 1, "not a host name"),
    ("hosts/cluster", 1, 1, "no such file"),
    ("10.0.0.256", 1, 1, "IPv4"),
    ("10.0.0.01", 1, 1, "leading zeros"),
    ("10.0.0", 1, 1, "IPv4"),
    ("8", 1, 1, "neither a host name nor"),
    ("[::g]", 1, 2, "not an IPv6 address"),
    ("[::1", 1, 1, "brackets in '[::1' do not match"),
    ("[::1]8", 1, 2, "not a range"),
    # Open MPI's filters.
    ("^node1", 1, 1, "use --exclude"),
    ("a\n  ^node1 slots=4", 2, 3, "use --exclude"),
    ("+n2", 1, 1, "use --exclude"),
    ("+e:1", 1, 1, "use --exclude"),
    # Ranges.
    ("n[1-999999999]", 1, 3, "more than 100,000 hosts"),
    ("n[1-1000]m[1-1000]", 1, 1, "more than 100,000 hosts"),
    ("n[1-99999]\nm[1-99999]", 2, 1, "more than 100,000 hosts"),
    ("n[1-99999999999999999999]", 1, 3, "not a range"),
    ("n[5-1]", 1, 3, "first must not be above"),
    ("n[01-100]", 1, 3, "equally long"),
    ("n[1-5/0]", 1, 3, "not a range"),
    ("n[]", 1, 3, "'' is not a range"),
    ("n[1,,2]", 1, 5, "'' is not a range"),
    ("n[1,x]", 1, 5, "'x' is not a range"),
    ("n[٣-٤]", 1, 3, "not a range"),
    ("n[1-3", 1, 1, "do not match"),
    ("n1-3]", 1, 1, "do not match"),
    ("n[[1-3]]", 1, 1, "do not match"),
    ("10.0.0.[255-256]", 1, 1, "IPv4"),
    # Lists.
    ("a,,b", 1, 3, "no host here"),
    ("a:1,", 1, 5, "no host here"),
    (",a", 1, 1, "no host here"),
    ("a:4,b:4,c:0", 1, 11, "whole number"),
    # Repetitions.
    ("a slots=4\n\na slots=4", 3, 1, "a is already on line 1"),
    ("a:4\nb:4\na:4", 3, 1, "a is already on line 1"),
    ("a slots=4\na", 2, 1, "a is already on line 1"),
    ("a\nA slots=4", 2, 1, "A is already on line 1"),
    ("n[1-3] slots=4\nn2 slots=4", 2, 1, "n2 is already on line 1"),
    ("a port=22\na port=23", 2, 1, "already on line 1 with other settings"),
    ("a\na role=server", 2, 1, "with other settings"),
    ("a:4,a:4", 1, 5, "a is already on line 1"),
    # Broken text.
    ("a\n b /* never\nclosed", 2, 4, "never closed"),
    ('a python="/x\nb', 1, 10, "never closed"),
    ("a\nb\0c", 2, 0, "NUL bytes"),
]

GOOD_LISTS: list[tuple[str, list[Host]]] = [
    ("a", [h("a", line=0)]),
    ("a:2,b:2", [h("a", 2, line=0), h("b", 2, line=0)]),
    ("a, b:2,  c", [h("a", line=0), h("b", 2, line=0), h("c", line=0)]),
    (" a:2 , b ", [h("a", 2, line=0), h("b", line=0)]),
    ("gpu[09-10]:8", [h("gpu09", 8, line=0), h("gpu10", 8, line=0)]),
    ("n[1,3]:2,m", [h("n1", 2, line=0), h("n3", 2, line=0), h("m", line=0)]),
    ("bob@a:4,b", [h("a", 4, line=0, user="bob"), h("b", line=0)]),
    ("[::1]:2,[fe80::1%eth0]", [h("::1", 2, line=0), h("fe80::1%eth0", line=0)]),
    ("bob@[::1]:2", [h("::1", 2, line=0, user="bob")]),
    ("10.0.0.1:4,10.0.0.2:4", [h("10.0.0.1", 4, line=0), h("10.0.0.2", 4, line=0)]),
    ("a,a,b", [h("a", 2, line=0), h("b", line=0)]),
    ("a:22", [h("a", 22, line=0)]),
]

BAD_LISTS: list[tuple[str, int, str]] = [
    ("", 1, "no hosts"),
    ("  ", 1, "no hosts"),
    (",", 1, "no host here"),
    ("a,", 3, "no host here"),
    ("a, ,b", 3, "no host here"),
    ("a b", 3, "a comma between hosts"),
    ("a slots=2", 3, "did not expect 'slots=2'"),
    ("a:2,b:none", 7, "'none'"),
    ("a:0", 3, "whole number"),
    ("a:2, a:2", 6, "a is already named"),
    ("a:2,^b", 5, "use --exclude"),
    ("a:1,2@b:3", 5, "--include"),
    ("a,-oProxyCommand=x", 3, "ssh would take it for an option"),
    ("a,n[1-999999]", 5, "more than 100,000"),
    ("hostfiles/missing.txt", 1, "no such file"),
    ("a!b", 1, "not a host name"),
    ("a\0b", 1, "not a host name"),
]

SLURM: list[tuple[dict[str, str], list[Host] | None]] = [
    ({}, None),
    ({"SLURM_JOB_NODELIST": ""}, None),
    ({"SLURM_TASKS_PER_NODE": "2"}, None),
    ({"SLURM_JOB_NODELIST": "n1"}, [h("n1", line=0)]),
    ({"SLURM_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "4", "SLURM_NTASKS": "4"}, [h("n1", 4, line=0)]),
    (
        {"SLURM_JOB_NODELIST": "n1", "SLURM_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"},
        [h("n1", 1, line=0)],
    ),
    (
        {"SLURM_JOB_NODELIST": "n[1-3,7]", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NTASKS": "7"},
        [h("n1", 2, line=0), h("n2", 2, line=0), h("n3", 2, line=0), h("n7", 1, line=0)],
    ),
    (
        {"SLURM_JOB_NODELIST": "n[3,1],gpu-[08-09]-a", "SLURM_TASKS_PER_NODE": "3,1,2(x2)", "SLURM_NPROCS": "8"},
        [h("n3", 3, line=0), h("n1", 1, line=0), h("gpu-08-a", 2, line=0), h("gpu-09-a", 2, line=0)],
    ),
]

TWO = {"SLURM_JOB_NODELIST": "n[1-2]"}
ONE_TASK = {**TWO, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "2"}
UNASKED = {**TWO, "SLURM_TASKS_PER_NODE": "128(x2)", "SLURM_JOB_CPUS_PER_NODE": "128(x2)"}
IN_STEP = {
    **TWO,
    "SLURM_STEP_ID": "0",
    "SLURM_TASKS_PER_NODE": "1",
    "SLURM_NTASKS": "1",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2)",
}
A_RANK_PER_GPU = "one rank for each"

# Slurm's variables, then slots and max_slots of each host, and words of the note.
SLURM_SLOTS: list[tuple[dict[str, str], int | None, int | None, str]] = [
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "8"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "gpu:8"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, 6, 6, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "gpu:a100:4(S:0-1)"}, 4, 4, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "a100"}, 1, 1, ""),
    ({**ONE_TASK, "SLURM_GPUS_ON_NODE": "4"}, 4, 4, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "8"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS": "16"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_GPUS": "16", "SLURM_GPUS_ON_NODE": "9"}, 1, None, ""),  # GPUs of each host unknown
    ({**ONE_TASK, "SLURM_GPUS": "3"}, 1, None, ""),
    ({**ONE_TASK, "SLURM_GPUS_PER_TASK": "a100:8"}, 8, 8, A_RANK_PER_GPU),
    ({**ONE_TASK, "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_PER_TASK": "2"}, 4, 8, ""),
    ({**ONE_TASK, "SLURM_GPUS_PER_NODE": "0"}, 1, None, ""),
    ({**ONE_TASK, "SLURM_JOB_CPUS_PER_NODE": "16(x2)"}, 1, 16, ""),
    ({**UNASKED, "SLURM_GPUS_PER_NODE": "8"}, 8, 8, A_RANK_PER_GPU),
    (UNASKED, None, 128, ""),
    ({**UNASKED, "SLURM_NTASKS": "256"}, 128, 128, ""),
    ({**ONE_TASK, "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_GPUS_PER_NODE": "8"}, 4, 8, ""),
    (IN_STEP, None, 4, "inside a Slurm step"),
    ({**IN_STEP, "SLURM_NTASKS_PER_NODE": "2"}, 2, 4, "inside a Slurm step"),
    ({**IN_STEP, "SLURM_GPUS_PER_NODE": "8"}, 8, 8, A_RANK_PER_GPU),
    ({**IN_STEP, "SLURM_JOB_CPUS_PER_NODE": "4"}, None, None, "inside a Slurm step"),
    ({**ONE_TASK, "SLURM_HET_SIZE": "2"}, 1, None, "heterogeneous job of 2 components"),
]

BAD_SLURM: list[tuple[str, str, str, int, str]] = [
    ("n[1-3", "1", "SLURM_JOB_NODELIST", 1, "do not match"),
    ("n1,-x", "1", "SLURM_JOB_NODELIST", 4, "option"),
    ("n[1-3]", "2(x2)", "SLURM_TASKS_PER_NODE", 1, "tasks for 2 of the 3 hosts"),
    ("n[1-3]", "2(x4)", "SLURM_TASKS_PER_NODE", 1, "more than the 3 hosts"),
    ("n[1-3]", "2(x999999999)", "SLURM_TASKS_PER_NODE", 1, "more than the 3 hosts"),
    ("n[1-3]", "2,2(x", "SLURM_TASKS_PER_NODE", 3, "'2(x' is not a count of tasks"),
    ("n[1-3]", "2(x2),0", "SLURM_TASKS_PER_NODE", 7, "whole number"),
    ("n[1-3]", "2(x0),1", "SLURM_TASKS_PER_NODE", 1, "tasks for 1 of the 3"),
]


def shorten(value: object) -> str | None:
    return repr(value)[1:41] if isinstance(value, str) else None


@pytest.mark.parametrize(("dialect", "text", "hosts"), GOOD_FILES, ids=shorten)
def test_good_file(dialect: str, text: str, hosts: list[Host]) -> None:
    read = parse_hostfile(text, "hosts.txt")
    assert list(read.hosts) == hosts
    assert (read.dialect, read.source) == (dialect, "hosts.txt")


@pytest.mark.parametrize(("text", "line", "column", "message"), BAD_FILES, ids=shorten)
def test_bad_file(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_hostfile(text, "hosts.txt")
    assert message in str(caught.value)
    assert (caught.value.source, caught.value.line, caught.value.column) == ("hosts.txt", line, column)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(("text", "hosts"), GOOD_LISTS, ids=shorten)
def test_good_list(text: str, hosts: list[Host]) -> None:
    read = parse_host_list(text)
    assert list(read.hosts) == hosts
    assert (read.dialect, read.source) == ("inline", "-H")


@pytest.mark.parametrize(("text", "column", "message"), BAD_LISTS, ids=shorten)
def test_bad_list(text: str, column: int, message: str) -> None:
    with pytest.raises(HostfileError) as caught:
        parse_host_list(text)
    assert message in str(caught.value)
    assert (caught.value.source, caught.value.line, caught.value.column) == ("-H", 0, column)


@pytest.mark.parametrize(("environ", "hosts"), SLURM)
def test_slurm(environ: dict[str, str], hosts: list[Host] | None) -> None:
    read = slurm_hosts(environ)
    if hosts is None:
        assert read is None
    else:
        assert read is not None
        assert list(read.hosts) == hosts
        assert (read.dialect, read.source) == ("slurm", "Slurm")


@pytest.mark.parametrize(("nodes", "tasks", "variable", "column", "message"), BAD_SLURM)
def test_bad_slurm(nodes: str, tasks: str, variable: str, column: int, message: str) -> None:
    with pytest.raises(HostfileError) as caught:
        slurm_hosts({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks})
    assert message in str(caught.value)
    assert (caught.value.source, caught.value.column) == (variable, column)


@pytest.mark.parametrize(("environ", "slots", "most", "note"), SLURM_SLOTS)
def test_slots_of_slurm(environ: dict[str, str], slots: int | None, most: int | None, note: str) -> None:
    read = slurm_hosts(environ)
    assert read is not None
    assert list(read.hosts) == [h(name, slots, max_slots=most, line=0) for name in ("n1", "n2")]
    assert note in " ".join(read.notes) and bool(note) == bool(read.notes)


def test_gpus_of_every_host() -> None:
    assert gpus_per_host({}) == 0
    assert gpus_per_host(UNASKED) == 0
    assert gpus_per_host({**ONE_TASK, "SLURM_GPUS_PER_TASK": "8"}) == 8
    assert gpus_per_host({**ONE_TASK, "SLURM_TASKS_PER_NODE": "2,1", "SLURM_GPUS_PER_TASK": "2"}) == 0
    assert gpus_per_host({**ONE_TASK, "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_PER_NODE": "2"}) == 0


def test_components_that_no_step_spans() -> None:
    components = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n1", "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]"}
    with pytest.raises(HostfileError, match="heterogeneous job of 2 components"):
        slurm_hosts({"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", **components})


def test_the_table_is_long_enough() -> None:
    assert len(GOOD_FILES) + len(BAD_FILES) + len(GOOD_LISTS) + len(BAD_LISTS) + len(SLURM) + len(BAD_SLURM) >= 200


# Notes on ambiguous text.


def test_alike_notes_are_one() -> None:
    (note,) = parse_hostfile("".join(f"10.0.0.{i} binding=rr\n" for i in range(1, 100)), "hosts.txt").notes
    assert note.startswith("hosts.txt:1: binding='rr'")
    assert note.endswith("(and 98 more like it)")


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("a\nb\na\n", "hosts.txt:1: a is named 2 times: taken as 2 slots"),
        ("a:4 binding=rr", "hosts.txt:1: binding='rr' is MPICH's and is ignored; use --bind"),
    ],
)
def test_notes(text: str, note: str) -> None:
    assert [found[: len(note)] for found in parse_hostfile(text, "hosts.txt").notes] == [note]


@pytest.mark.parametrize("text", ["a:4", "a slots=22", "a port=22", "2001:db8:0:0:0:0:0:4", "n[1-4]", "a\nb"])
def test_nothing_to_note(text: str) -> None:
    assert parse_hostfile(text, "hosts.txt").notes == ()


def test_a_dialect_with_a_grammar_of_its_own_is_registered_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(text: str, source: str, notes: Notes) -> Iterator[tuple[Host, SourcePlace]]:
        for number, line in enumerate(text.splitlines()[1:], 1):
            yield Host(name=line, slots=2, line=number + 1), SourcePlace(source, number + 1)

    lsf = HostfileDialect("lsf", recognizes=lambda text: text.startswith("%LSF"), parse=parse)
    monkeypatch.setattr("distrib.cluster.hostfile.DIALECTS", [lsf, *DIALECTS])
    read = parse_hostfile("%LSF\nn1\nn2\n", "hosts.txt")
    assert (read.dialect, [host.name for host in read.hosts]) == ("lsf", ["n1", "n2"])
    assert parse_hostfile("n1:4", "hosts.txt").dialect == "mpich"


# Files.


def test_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes("\ufeffnode1 slots=2 # größer\r\n".encode())
    assert read_hostfile(path) == HostList(hosts=(h("node1", 2),), source=str(path), dialect="openmpi", notes=())


@pytest.mark.parametrize(
    ("data", "line", "message"),
    [
        (b"", 0, "no hosts"),
        (b"node1\nn\xf6de2\n", 2, "byte 0xf6 is not UTF-8"),
        (b"\x7fELF\x02\x01\x01\0\0\0", 1, "NUL bytes"),
        (b"\x89PNG\r\n\x1a\n", 1, "not UTF-8"),
        ("node1".encode("utf-16"), 0, "UTF-16"),
        (b"# ours\n[web]\nn1\nn2\n", 2, "not a range"),
        (b"n1\nn2 ansible_host=10.0.0.1\n", 2, "unknown setting"),
        (b"#" * (16 * 2**20 + 1), 0, "larger than 16 MiB"),
    ],
)
def test_a_file_that_is_no_hostfile(tmp_path: Path, data: bytes, line: int, message: str) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(data)
    with pytest.raises(HostfileError, match=message) as caught:
        read_hostfile(path)
    assert (caught.value.source, caught.value.line) == (str(path), line)
    assert caught.value.hint


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in [
        (str(tmp_path / "missing"), "no such hostfile"),
        (str(tmp_path), "directory"),
        ("x" * 5000, "cannot read"),
        ("a\0b", "cannot read"),
        ("/dev/zero", "larger than"),
    ]:
        with pytest.raises(HostfileError, match=message) as caught:
            read_hostfile(path)
        assert caught.value.hint

    def refuse(*_: object) -> None:  # root ignores mode bits
        raise PermissionError(13, "Permission denied")

    (tmp_path / "hosts.txt").touch()
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(HostfileError, match="Permission denied"):
        read_hostfile(tmp_path / "hosts.txt")


def test_hosts_that_come_through_a_pipe_are_known_when_they_are_asked_for_again() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"n1 slots=2\nn2\n")
    os.close(writer)
    first, second = (read_hostfile(f"/dev/fd/{reader}") for _ in range(2))
    os.close(reader)
    assert [host.name for host in first.hosts] == ["n1", "n2"] and second == first


def test_a_topology_in_place_of_a_hostfile_is_told_so():
    with pytest.raises(HostfileError, match="this is a topology file"):
        read_hostfile(EXAMPLES / "mixed-gpus.yaml")


def test_the_examples_are_hostfiles() -> None:
    assert read_hostfile(EXAMPLES / "localhost.txt").hosts[0].name == "localhost"
    cluster = read_hostfile(EXAMPLES / "cluster.txt")
    assert [(host.name, host.slots) for host in cluster.hosts] == [(f"node{i}", 8) for i in range(1, 5)]
    assert (cluster.dialect, cluster.notes) == ("openmpi", ())


def test_every_setting_in_the_example_is_one() -> None:
    text = (EXAMPLES / "cluster.txt").read_text()
    keys = [line.split()[1] for line in text.splitlines() if line.startswith("#     ") and "=" in line.split()[1]]
    assert len(keys) == 6
    assert parse_hostfile("a " + " ".join(keys), "x").hosts[0].role == "server"


# Properties of any text. Half of the texts consist of parts of hostfiles, to get past the first check.

VOCABULARY = """
    a b n1 node [ ] [1-3] [01-99] [1-9999999] :4 :22 : , @ bob@ - ^ + = / // /* */ # slots slots= max_slots=1 user= port=
    python= role=server binding= 10.0.0.1 ::1 [::1] % 0 4 2(x3) (x " \\ ٣ ö
"""
BLANKS_AND_JUNK = [" ", "\t", "\n", "\r\n", "\x85", "\u2028", "\ufeff", "\0", "\ud800"]
PIECES = st.sampled_from([*VOCABULARY.split(), *BLANKS_AND_JUNK])
TEXTS = st.text(st.characters()) | st.lists(PIECES, max_size=30).map("".join)


@settings(deadline=None)  # a range may expand to 100,000 hosts
@given(TEXTS)
@example("a python=/")
@example("[" * 5000)
@example("[1]" * 5000)
@example("a" + "@" * 5000)
@example("9" * 5000)
def test_any_text_gives_hosts_or_a_hostfile_error(text: str) -> None:
    parsers: list[Callable[[], HostList | None]] = [
        lambda: parse_hostfile(text, "hosts.txt"),
        lambda: parse_host_list(text),
        lambda: slurm_hosts({"SLURM_JOB_NODELIST": text}),
        lambda: slurm_hosts({"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": text}),
    ]
    for parse in parsers:
        try:
            read = parse()
        except HostfileError as error:
            assert "\n" not in str(error)
        else:
            assert read is None or (read.hosts and not any(host.name.startswith("-") for host in read.hosts))
            if read is not None:
                assert without_lines(parse_hostfile(format_hostfile(read.hosts), "x").hosts) == without_lines(
                    read.hosts
                )


LABELS = st.from_regex(r"[a-z_][A-Za-z0-9_-]{0,10}", fullmatch=True)
NAMES = (
    LABELS
    | st.lists(LABELS, min_size=2, max_size=4).map(".".join)
    | st.ip_addresses(v=4).map(str)
    | st.ip_addresses(v=6).map(str)
    | st.ip_addresses(v=6, network="fe80::/64").map(lambda address: f"{address}%eth0")
)
PATHS = st.text(st.characters(exclude_categories=("C", "Z"), exclude_characters='"') | st.just(" ")).map("/".__add__)


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    slots = draw(st.none() | st.integers(1, 100_000))
    return Host(
        name=draw(NAMES),
        slots=slots,
        max_slots=draw(st.none() | st.integers(slots or 1, 100_000)),
        user=draw(st.none() | LABELS),
        port=draw(st.none() | st.integers(1, 65_535)),
        python=draw(st.none() | PATHS),
        role=draw(st.sampled_from(["worker", "server"])),
    )


def without_lines(read: tuple[Host, ...]) -> list[Host]:
    return [msgspec.structs.replace(host, line=0) for host in read]


@settings(deadline=None)
@given(st.lists(hosts(), min_size=1, max_size=10, unique_by=lambda host: host.name.lower()))
def test_what_is_written_reads_back(written: list[Host]) -> None:
    assert without_lines(parse_hostfile(format_hostfile(written), "x").hosts) == written


# Speed.


def test_a_thousand_lines_are_read_at_once() -> None:
    text = "".join(f"node{i} slots=8 max_slots=16 user=bob  # rack {i % 7}\n" for i in range(1000))
    seconds = []
    for _ in range(5):
        start = time.process_time()
        assert len(parse_hostfile(text, "x").hosts) == 1000
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5  # 0.03 on an idle machine


def test_importing_loads_little() -> None:
    code = "import sys, distrib.cluster.hostfile; print(*{'ClusterShell', 'torch', 'yaml'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent)
    assert done.stdout.strip() == ""
