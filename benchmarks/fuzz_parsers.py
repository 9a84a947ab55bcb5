"""Table of the parsers that `fuzz.py` feeds, with a valid sample of every kind of input."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import torch
from fuzz_inputs import ROOT, binary, documented, example, examples, option_samples, tables, texts

from distrib import strategy, units
from distrib.bandwidth_model import hypothetical, workload
from distrib.bandwidth_model.workload import Workload, validate_workload
from distrib.cluster import hardware_catalog, hostfile, inventory, link_spec, measurements_io, node, slurm, topology
from distrib.cluster.measurements import Measurements
from distrib.cluster.remote import gpu_inventory, network_inventory, sysfs
from distrib.errors import DistribError
from distrib.probe import journal, records
from distrib.training import world
from distrib.training.checkpoint import checkpoint_format, replicas
from distrib.training.parameter_server import server, transport
from distrib.utils.framing import ProtocolError
from distrib.utils.json_text import decode_json
from distrib_launch import engines, host_selection, html_report, profile_request, results, run_directory, runner
from distrib_launch.arguments import config_file, launch_arguments
from distrib_launch.cli import launch, topo
from distrib_launch.console import Console
from distrib_launch.engines import srun, ssh, ssh_wrapper
from distrib_launch.preflight import interface_selection
from distrib_launch.rank_agent.control_channel import Channel, Kind
from distrib_launch.rank_agent.stack_dump import with_state
from distrib_launch.supervisor import root_cause
from distrib_launch.supervisor.hang_report import parse_stack
from distrib_launch.supervisor.rank_exit import parse_error_record
from distrib_launch.supervisor.supervisor import Supervisor


class Refused(Exception):
    """A refusal that a parser reports with its result."""


@dataclass(frozen=True)
class Parser:
    """A parser under test."""

    samples: Sequence[str]
    parse: Callable[[str], object]
    """Gets a text, whose lone surrogates stand for bytes that are not UTF-8."""
    errors: tuple[type[Exception], ...] = (DistribError,)
    """Documented errors, besides `Refused`. ValueError does not include its subclasses."""


def file_of(text: str, name: str) -> str:
    Path(name).write_bytes(binary(text))
    return name


def required(parsed: object) -> object:
    if parsed is None:
        raise Refused
    return parsed


def environment(text: str) -> dict[str, str]:
    """Return the variables of lines `NAME=value`. No variable contains NUL bytes."""
    return dict(os.fsdecode(binary(line)).partition("=")[::2] for line in text.replace("\0", "").split("\n"))


def read_measured(text: str) -> object:
    return required(measurements_io.decode_measured(binary(text).decode(errors="replace")))


def read_record(text: str) -> object:
    return required(records.decode_record(binary(text)))


def read_journal(text: str) -> object:
    path = Path(file_of(text, "probe.journal"))
    found = journal.Journal(path, ("n1",), "quick", None)
    try:
        return found.write('{"type":"started"') or found.resume_input(["n1"]) or found.done_with(["n1"])
    finally:
        found.remove()


def read_catalog(text: str) -> object:
    with mock.patch.object(hardware_catalog, "PATH", Path(file_of(text, "catalog.yaml"))):
        return hardware_catalog.hardware_catalog.__wrapped__()  # without its cache


def read_config(text: str) -> object:
    path = file_of(text, "job.toml" if re.match(r"\S+ = ", text) else "job.yaml")
    return launch_arguments.launch_options(
        config_file.parse_with_config(launch_arguments.parser(), ["--config", path, "train.py"])
    )


@functools.cache
def module() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@functools.cache
def checkpoints() -> list[str]:
    model, optimizer = module()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint_format.write("sample.pt", {"model": model, "optimizer": optimizer, "epoch": 3, "list": [1, "a"]})
    return [Path("sample.pt").read_bytes().decode("latin-1")]


def read_checkpoint(text: str) -> object:
    """Read a damaged file, or one whose checksum fits its damage."""
    data = text.encode("latin-1", "replace")
    if len(data) % 2:
        data = data[: -checkpoint_format._CHECKSUM_BYTES]
        data += checkpoint_format._checksum_line(zlib.crc32(data))
    Path("x.pt").write_bytes(data)
    replicas.stamp_of("x.pt")
    model, optimizer = module()
    content = checkpoint_format.content("x.pt")
    return checkpoint_format.read(
        content or b"", {"model": model, "optimizer": optimizer}, torch.device("cpu"), source="x.pt"
    )


@functools.cache
def supervisor() -> Supervisor:
    options = launch_arguments.parse(["-H", "n1,n2", "--run-dir", "run", "train.py"])
    plan = runner.plan_launch(options)
    (Path("run") / "ranks").mkdir(parents=True, exist_ok=True)
    return Supervisor(plan, Console(["n1", "n2"], streams=(io.StringIO(), io.StringIO())))


def read_rank_frames(text: str) -> object:
    """Send lines `KIND payload` over a control connection: the first letter `!` skips the signature."""
    ours, theirs = socket.socketpair()
    launcher, agent = Channel(ours, "token", listener=True), Channel(theirs, "token", listener=False)
    job = supervisor()
    state = job.job.ranks[0]
    state.exit, job.job.failed_at, job.job.assigned = None, 0.0, True
    state.channel = launcher
    count = 0
    try:
        launcher.flush()
        list(agent.receive())
        list(launcher.receive())
        list(agent.receive())
        for line in text.split("\n"):
            name, _, payload = line.partition(" ")
            if name in Kind.__members__:
                agent.send(Kind[name], binary(payload.replace("|", "\n"))[: 1 << 15])
            else:
                agent.outgoing += binary(line)
            agent.flush()
        for kind, body in launcher.receive():
            job.connections._on_frame(state, kind, body)
            count += 1
    except (OSError, ProtocolError, ValueError) as error:  # as the listener does
        raise Refused from error
    finally:
        launcher.close()
        agent.close()
    return count


def read_server_frames(text: str) -> object:
    """Send lines `KIND flags table chunk step version weight|payload` to a parameter server, and other lines as they are.

    The server knows the sender unless the text begins with `!`.
    """
    there = server.ParameterServer(0, [("127.0.0.1", 0)], 1, b"key", strategy.Strategy(mode="async"))
    ours, theirs = socket.socketpair()
    peer = server._Peer(there, ours)
    there.peers.add(peer)
    peer.connection._handshake.proven = text[:1] != "!"
    for line in text.split("\n"):
        header, _, payload = line.partition("|")
        words = re.findall(r"[A-Z_]+|[0-9]{1,4}", header)
        data = binary(line)[:4096]
        if len(words) == 7 and words[0] in transport.FrameKind.__members__:
            numbers = [int(word) % 256 for word in words[1:] if word.isdecimal()]
            body = binary(payload)[:4096]
            if len(numbers) == 6:
                data = transport.HEADER.pack(transport.FrameKind[words[0]], *numbers, len(body)) + body
        with contextlib.suppress(OSError):
            theirs.send(data)
        if peer in there.peers:
            there.loop._run(peer.connection._on_events, 1)
    is_refused = peer.is_refused or peer not in there.peers
    theirs.close()
    there.close_peer(peer)
    there.listener.close()
    there.loop.ended = True
    there.loop.run()
    if is_refused:
        raise Refused
    return True


def read_result(text: str) -> object:
    """Write the report of a result and of logged metrics."""
    content, _, metrics = text.partition("\n")
    file_of(metrics, "metrics.jsonl")
    if re.search(
        r"(_seconds|efficiency|per_second)\": *(-|1e999)", content
    ):  # the launcher refuses such reports of ranks
        raise Refused
    plan, result = supervisor().job.plan, decode_json(binary(content), results.Result)
    html_report.write_report(plan, result, Path(), 0.0)
    run_directory.write_json(Path("copy.json"), result)
    return root_cause.failure_report(result.first_failure, [], started=0.0) if result.first_failure else result


def read_output(text: str) -> object:
    """Show the output of two ranks; the report takes its end."""
    console = supervisor().job.console
    for number, part in enumerate(text.split("|")):
        console.rank_output(number % 2, 1 + number % 3 % 2, binary(part))
    console.finish_rank(0)
    text = binary(text).decode(errors="replace")
    found = (
        root_cause.error_in(text),
        root_cause.fault_in(text),
        root_cause.python_stack(text),
        root_cause.is_consequence(None, text),
    )
    for name in ("mpirun", "srun"):
        engine: Any = engines.get(name)
        engine.explain(text)
        engine.messages(text)
        engine.lost_host(text)
        engine.is_transient_failure(text)
    slurm_engine: Any = engines.get("srun")
    slurm_engine.cancelled(text)
    slurm_engine.queued(Path(file_of(text, "engine.log")))
    srun._gpu_counts(text)
    return found


def read_ssh_words(text: str) -> object:
    words = text.split("\n")
    ssh._without_config(words)
    return ssh_wrapper.rewrite(words, {"ssh": ["ssh"], "prefix": "/opt/mpi", "prefixes": {"n1": "/opt/other"}})


def read_host_files(text: str) -> object:
    """Read files of /proc and /sys with lines of the text as their contents."""
    lines = [*(line[:4000] for line in text.split("\n")), "", "", ""]  # one page of the kernel
    contents = dict(
        zip(
            ("max_link_speed", "max_link_width", "current_link_width", "numa_node", "information", "version"),
            lines,
            strict=False,
        )
    )
    attributes = network_inventory._parse_attributes(binary(text))

    def read(path: str, limit: int = 0) -> str:
        return binary(contents.get(path.rpartition("/")[2], lines[0])).decode(errors="replace").strip()

    with mock.patch.object(sysfs, "read_proc_text", read), mock.patch.object(gpu_inventory, "read_proc_text", read), \
            mock.patch.object(network_inventory, "read_proc_text", read):  # fmt: skip
        found = sysfs.pcie_link("/d"), sysfs.current_pcie_width("/d"), sysfs.numa_node("/d")
        return (
            found,
            gpu_inventory.driver_version(),
            gpu_inventory.has_gpudirect(),
            network_inventory.read_port_range(),
            attributes,
        )


def read_variables(text: str) -> object:
    environ = environment(text)
    found = slurm.slurm_hosts(environ), slurm.gpus_per_host(environ), strategy.strategy_from_environment(environ)
    world.planned_world(environ)
    server.read_server_addresses(environ)
    return found


def find_gpu(text: str) -> object:
    hardware_catalog.gpu_hint(text)
    return required(hardware_catalog.find_gpu(text))


def read_profile(text: str) -> None:
    Path("ranks").mkdir(exist_ok=True)
    file_of(text, "ranks/0.value")
    done = SimpleNamespace(status="succeeded")
    options: Any = SimpleNamespace(profile="new.json", script="train.py", quiet=True)
    profile_request.save(options, done, Path(), supervisor().job.console)  # type: ignore[arg-type]


def read_workload(text: str) -> object:
    return validate_workload(workload.read_workload(file_of(text, "w.json")))


def read_reply(text: str) -> object:
    return required(inventory.parse_reply(text, inventory.InventoryReply))


def run_command(main: Callable[[Sequence[str]], int], *first: str) -> Callable[[str], object]:
    def run(text: str) -> object:
        try:
            code = main([*first, *(os.fsdecode(binary(word)) for word in text.split("\n"))])
        except SystemExit as error:  # of --help and --version
            code = int(error.code or 0)
        if code not in (0, 2, 1):
            raise AssertionError(f"exit code {code}")
        if code:
            raise Refused
        return code

    return run


def any_of(*parse: Callable[[str], object]) -> Callable[[str], object]:
    """Return a parser that refuses what all of these refuse."""

    def read(text: str) -> object:
        found: list[object] = []
        for each in parse:
            with contextlib.suppress(Refused):
                try:
                    found.append(each(text))
                except (ValueError, DistribError) as error:
                    if type(error) is not ValueError and not isinstance(error, DistribError):
                        raise
        if not found:
            raise Refused
        return found

    return read


def workload_sample() -> str:
    gradient = {"name": "w", "elements": 2, "size_bytes": 8, "ready_seconds": 0.1}
    return json.dumps({**example(Workload), "device": "cpu", "gradients": [gradient]})


def write_files() -> None:
    """Write the files that samples name into the working directory."""
    Path("cluster.yaml").write_text((ROOT / "hostfiles/h100-ndr.yaml").read_text())
    Path("hosts.txt").write_text("n1 slots=2\nn2 slots=2\n")
    Path("train.py").touch()
    Path("job.toml").write_text("np = 2\n")
    Path("w.json").write_text(workload_sample())


@functools.cache
def parsers() -> dict[str, Parser]:
    """Return all parsers by name."""
    _, commands = topo.build_parser()
    rows = tables("hostfiles.yaml")
    value = (ValueError,)
    catalog = """sources: {a: {title: A}, b: {title: B, verified: no}}
gpus: [{name: T4, names: [Tesla T4], tflops: {fp32: [8.1, a], fp16: [65, b]}, memory: [16GB, a], memory_bandwidth: [320GB/s, a], pcie: [PCIe3 x16, b]}]
links: [{name: HDR, kind: infiniband, rate: [200Gb/s, a], usable: [0.9, b], latency: [1.3 us, a]}]
"""
    sizes = [
        "25MiB",
        "1.5 GB",
        "80Gb/s",
        "12.5 GB/s",
        "400Gbit/s",
        "5 us",
        "30s",
        "2h",
        "1.3e-6 s",
        "2:1",
        "1/3",
        "4 x 25Gb/s",
    ]
    networks = [
        "HDR",
        "4 x NDR",
        "25GbE",
        "RoCE 100Gb/s",
        "NVLink4 x18",
        "PCIe5 x16",
        "2x 100GbE",
        "800Gb/s",
        "HDR=1000",
        "NVLink C2C",
        "nic[0-3]",
    ]
    hosts = [str(text) for row in rows for text in row if isinstance(text, str)]
    slurm_job = ["SLURM_JOB_NODELIST=n[1-4,7],m1\nSLURM_TASKS_PER_NODE=2(x5),1\nSLURM_JOB_CPUS_PER_NODE=8(x6)\nSLURM_GPUS=a100:4\nSLURM_NTASKS=11",
                 "SLURM_NODELIST=n1\nSLURM_GPUS_PER_NODE=gpu:a100:4(S:0-1)\nSLURM_HET_SIZE=2\nSLURM_STEP_ID=1\nSLURM_NTASKS_PER_NODE=2",
                 'RANK=0\nWORLD_SIZE=2\nLOCAL_RANK=0\nLOCAL_WORLD_SIZE=2\nDISTRIB_STRATEGY={"mode": "local", "inner_steps": 5}\nDISTRIB_KEY=a\n'
                 "DISTRIB_SERVERS=[::1]:5,n1:6\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_RANK=0"]  # fmt: skip
    trace = 'Traceback (most recent call last):\n  File "train.py", line 3, in f\n    x()\nValueError: 1\n'
    output = [trace, "[n1:12] Signal: Segmentation fault (11)\n|10%|###  | 1/10\r20%|", "Fatal Python error: Bus error\n\nThread 0x1:\n  File \"a\", line 1 in f\n",
              "-" * 70 + "\nPRTE has lost communication with a remote daemon.\n  Remote daemon : [x,1] on node n2\n" + "-" * 70 + "\n",
              "srun: Required node not available (down)\nsrun: job 7 queued and waiting for resources\n*** STEP 1.0 ON n1 CANCELLED AT 2026-01-01T00 DUE TO TIME LIMIT ***",
              "n1 gpu:a100:4(S:0-1),gpu:h100:2,nvme:1", "\x1b[1A\x1b[31mred\x1b[0m\x1b]0;title\x07|connection reset by peer\n"]  # fmt: skip
    error = json.dumps(
        {
            "message": {
                "message": "ValueError: 1",
                "extraInfo": {"py_callstack": trace, "secondary": True, "own_callstack": ""},
            }
        }
    )
    ended = json.dumps({"device": "cpu", "placed": {"cpus": "0-3", "threads": 1, "problem": ""}, "exit_code": 1, "signal": None, "stopped_by": "",
                        "ended": 1.5, "message": "m", "error": error})  # fmt: skip
    status = ['{"step": 3}', '{"failing": true}', '{"warning": "w"}', '{"metrics": {"loss": 1.5, "x": "nan"}, "main": true}', '{"closing": true, "prepared": true}',
              '{"measured": {"steps": 2, "step_seconds": 0.1, "compute_seconds": 0.1, "exposed_seconds": 0.0, "sent_bytes_per_second": {"n2": 1}}}']  # fmt: skip
    stacks = json.dumps(
        [
            {
                "thread_name": "MainThread",
                "active": True,
                "os_thread_id": 1,
                "frames": [{"name": "f", "filename": "a.py", "line": 3, "module": "m"}],
            }
        ]
    )
    frames = [*(f"STATUS {line}|{status[0]}" for line in status), f"EXIT {ended}", f"STACKS {stacks}", 'HEARTBEAT {"ping": 1.0, "time": 2.0}\nHEARTBEAT {}',
              "OUT line|other\nERR line\nRESULT abc", "raw bytes without a signature"]  # fmt: skip
    hello = 'HELLO 0 0 0 0 0 1|{"worker": 0, "shard": 0, "epoch": 0, "silent": [], "tables": [], "main": [0, 0], "incarnation": "a", "restarted": false}'
    table = '{"optimizer": {"name": "SGD"}, "parameters": [["w", [2], 0, "float32"]], "options": [{"lr": 0.1}], "servers": 1}'
    requests = [f"{hello}\nDESCRIBE 0 1 0 1 0 1|{table}", f"{hello}\nPUSH 1 1 0 1 0 1|AAAA\nPULL 0 1 0 1 0 1|[0]\nCOMMIT 0 1 0 1 0 1|[0]",
                f'{hello}\nJOIN 0 0 0 1 0 1|{{"1": 2}}\nGROUP 0 0 0 1 1 1|{{"1": 2}}\nSTORE 1 0 0 1 1 1|abc\nFETCH 0 0 0 1 1 1|\nALL_GATHER 0 0 0 1 0 1|abc',
                f"{hello}\nSTATISTICS 0 0 0 1 0 1|\nRETIRE 0 1 0 1 0 1|\nLEAVE 0 0 0 1 0 1|", 'HELLO 0 0 0 0 0 1|{"server": 1, "shard": 0, "epoch": 2}\nSTATE 1 1 0 1 0 1|{}\nLOG 0 1 0 1 0 1|abc',
                "!raw bytes that prove nothing, of a port scanner: GET / HTTP/1.1"]  # fmt: skip
    described = [*texts("hostfiles/*.yaml") * 6, *(str(row[0]) for row in tables("topology_errors.yaml"))]
    measured = example(Measurements)
    in_file = measurements_io.encode_measured(msgspec.convert(measured, Measurements, strict=False))
    of_two = in_file.replace('"target": "n1"', '"target": "n2"').replace('hosts: ["n1"]', 'hosts: ["n1", "n2"]')
    configs = ["np = 2\nmode = \"local\"\ninner-steps = 5\nenv = [\"A=1\"]\nquiet = true\n", "np: 2\nhosts: n1:2,n2\nenv: {A: 1}\nmode: async\nservers: 2\nstale-rate: false\n",
               "grace: 30s\nbalance: true\npod-resource: [rdma/a=1]\nworkload: none\n"]  # fmt: skip
    return {
        "hostfile": Parser([*hosts, *texts("hostfiles/*.txt")], lambda text: hostfile.read_hostfile(file_of(text, "h.txt"))),
        "host list": Parser(["n1:2,n2:2", "bob@gpu[01-16]:8,[::1]:2", "10.0.0.1,fe80::1", *hosts], lambda text: hostfile.parse_host_list(text)),
        "hosts of a topology": Parser(["n[1-4,7]", "gpu-[01-16]-ib,n1"], node.expand_hosts, value),
        "host filter": Parser(["host:0,2@host2@node[3-8]:1", "n1", "n[1-2]:0-3"], lambda text: host_selection.parse_filter(text, "--include")),
        "topology": Parser(described, lambda text: topology.read_topology(file_of(text, "t.yaml"))),
        "topology with measurements": Parser([f"nodes:\n  - hosts: n[1-2]\n    gpus: {{kind: A100, count: 8}}\n    nics: [{{name: ib0, rate: HDR}}]\n{of_two}"], lambda text: topology.read_topology(file_of(text, "t.yaml"))),
        "measurements": Parser([in_file], read_measured),
        "probe records": Parser(examples(*records.Record.__args__), read_record),
        "probe journal": Parser(["\n".join(examples(*records.Record.__args__))], read_journal),
        "hardware catalogue": Parser([catalog], read_catalog),
        "sizes, rates, durations": Parser(sizes, any_of(units.parse_rate, units.parse_duration, units.parse_ratio, units.parse_size)),
        "links": Parser(networks, any_of(link_spec.parse_network_kind, link_spec.parse_bus_link, link_spec.parse_uplink_rate, link_spec.parse_network_link, find_gpu)),
        "networks of options": Parser([*networks, "eth0,10.0.0.0/8", "fe80::/10"], any_of(
            interface_selection.parse_interface, hypothetical.catalog_gpu_name, lambda text: hypothetical.parse_network_option(text, None, "--compare"))),
        "gradients": Parser(["fp32", "bf16", "powersgd:4", "topk:0.01", "int8"], strategy.parse_gradients),
        "variables of schedulers": Parser(slurm_job, read_variables),
        "workload": Parser([workload_sample()], read_workload),
        "profile of a rank": Parser([json.dumps({"workload": json.loads(workload_sample()), "problem": "", "steps": 2})], read_profile),
        "--config": Parser(configs, read_config),
        "checkpoint": Parser(checkpoints(), read_checkpoint),
        "frames of rank agents": Parser(frames, read_rank_frames),
        "frames of parameter servers": Parser(requests, read_server_frames),
        "error file of a rank": Parser([error, '{"message": "text"}'], lambda text: required(parse_error_record(text))),
        "stacks of a rank": Parser([stacks, "Error: no such process"], lambda text: parse_stack(supervisor().job.ranks[0], with_state(binary(text), 1))),
        "result and report": Parser([f"{one}\n{status[3]}\n{status[3]}" for one in examples(results.Result)], read_result, (msgspec.DecodeError,)),
        "output of ranks and engines": Parser(output, read_output),
        "ssh commands": Parser(["ssh\n-p\n22\n-F\nfile\nn1\nprted --x", "ssh\n-4Ffile\nn1\nsetenv PATH; /opt/mpi/bin/prted"], read_ssh_words),
        "files of hosts": Parser(["16.0 GT/s PCIe\n16\n8\n0\nModel: A100\nDevice Minor: 0\nNVRM Kernel Module for x86_64  535.1"], read_host_files),
        "inventories of hosts": Parser([f"hello\n<<distrib-host {one} distrib-host>>\n" for one in examples(inventory.InventoryReply)], read_reply),
        "distrib-launch": Parser([*documented("distrib-launch"), *option_samples(launch_arguments.parser())], run_command(launch.main, "--dry-run")),
        **{f"distrib-topo {name}": Parser([*documented(f"distrib-topo {name}"), *option_samples(commands[name], *more)], run_command(topo.main, name))
           for name, more in (("show", ("-H", "hosts.txt")), ("plan", ("--workload", "ResNet-50")), ("check", ("-H", "n1")), ("probe", ("-H", "n1")))},
    }  # fmt: skip
