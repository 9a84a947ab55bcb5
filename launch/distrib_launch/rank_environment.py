"""Environment of a rank: the user's variables, torchrun's names and those of distrib.

`planned` returns the variables that are known with the plan; `complete` adds the addresses that ranks report. On the host, the rank
agent (`rank_agent.agent`, `rank_agent.script_process`) adds the rest to its own environment: the key of the parameter servers, the
variables of the device, OMP_NUM_THREADS, the error file and the pipes to the agent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distrib import environment as env
from distrib import strategy as strategies
from distrib.errors import ConfigError

if TYPE_CHECKING:
    from distrib_launch.launch_options import LaunchOptions
    from distrib_launch.rank_placement import HostPlan

SHOWN_PREFIXES = (
    "NCCL_", "GLOO_", "UCX_", "FI_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32_", "CUDA_DEVICE_MAX_", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_",
    "CUDA_MODULE_", "TORCH_", "PYTORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TRITON_", "OMP_", "MKL_", "HF_", "WANDB_", "HOROVOD_",
    "ACCELERATE_", "FSDP_", "DS_", "DEEPSPEED_", "PL_", "LT_", "LIGHTNING_", "MLFLOW_", "TENSORBOARD_", "TRANSFORMERS_", "TOKENIZERS_",
    "PYTHONHASHSEED", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONOPTIMIZE", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONMALLOC",
)  # fmt: skip
"""Prefixes of variables that change how a job computes or communicates: plans show them. Ranks get others, too (`rank_agent.forwarding`)."""

_SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW(OR)?D|PASSPHRASE|CREDENTIAL|APIKEY|((API|ACCESS|SSH|PRIVATE|SIGNING|MASTER)_?KEYS?"
    r"|(?<!COM)(?<!BY)PASS|(^|_)(KEYS?|PWD|PAT|O?AUTH|AUTHORIZATION))\d*(_|$)",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Return True if the value of a variable must not be written to files or shown.

    Args:
        name: Name of the variable, such as `WANDB_API_KEY` or `HF_TOKEN`.
    """
    return name != "PWD" and _SECRET.search(name) is not None


def mask_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with `***` in place of each secret.

    Args:
        environment: Values by name.
    """
    return {name: "***" if is_secret(name) else value for name, value in environment.items()}


def forwarded_variables(environ: Mapping[str, str], requested: Sequence[str]) -> dict[str, str]:
    """Return the user's variables that plans and manifests show; the ranks get the rest of the environment, too.

    Args:
        environ: Environment of the launcher; names with one of `SHOWN_PREFIXES` are shown.
        requested: Values of `-x`: `NAME` or `NAME=VALUE`; the last value of a name counts.

    Raises:
        ConfigError: An item has no valid name, the launcher sets that variable itself, or it is not in `environ`.
    """
    chosen = {name: value for name, value in environ.items() if name.startswith(SHOWN_PREFIXES)}
    for item in requested:
        name, equals, value = item.partition("=")
        if not name or any(c in name for c in " \t\n\0"):
            raise ConfigError(f"-x {item}: not a variable name", hint="write -x NAME or -x NAME=VALUE")
        if name in env.TORCHRUN_VARIABLES or name.startswith("DISTRIB_"):
            raise ConfigError(f"-x {name}: the launcher sets this variable itself, for each rank", hint="leave it out")
        if not equals and name not in environ:
            raise ConfigError(f"-x {name}: this variable is not set here", hint=f"set it, or write -x {name}=VALUE")
        chosen[name] = value if equals else environ[name]
    return chosen


def planned(
    options: LaunchOptions,
    hosts: Sequence[HostPlan],
    *,
    group: int,
    local_rank: int,
    rank: int,
    server: int | None = None,
) -> dict[str, str]:
    """Build the part of a rank's environment that is known with the plan.

    Args:
        options: Resolved options of the launch.
        hosts: Hosts of the plan in rank order.
        group: Index of the rank's host in `hosts`.
        local_rank: Rank among the processes of that host.
        rank: Global rank; servers follow the workers.
        server: Index of a parameter server, None for a worker.
    """
    host, workers = hosts[group], sum(host.workers for host in hosts)
    environment = {
        "PYTHONUNBUFFERED": "1",  # lines arrive when they are printed
        "PYTHONFAULTHANDLER": "1",  # the Python stack of a crash; Open MPI then leaves out its C stack
        **options.environment,
        env.WORLD_SIZE: str(workers),
        env.ROLE_WORLD_SIZE: str(workers if server is None else sum(host.servers for host in hosts)),
        env.GROUP_WORLD_SIZE: str(len(hosts)),
        env.TORCHELASTIC_RUN_ID: options.job_id or options.attempt_id,
        env.TORCHELASTIC_RESTART_COUNT: str(options.restarts),
        env.TORCHELASTIC_MAX_RESTARTS: str(options.max_restarts),
        env.DISTRIB_JOB: options.attempt_id,
        env.DISTRIB_MODE: options.strategy.mode,
        env.DISTRIB_STRATEGY: strategies.encode_strategy(options.strategy),
        env.DISTRIB_RUN_DIR: options.run_dir,
        env.RANK: str(rank),
        env.LOCAL_RANK: str(local_rank),
        env.LOCAL_WORLD_SIZE: str(host.workers if server is None else host.ranks),
        env.GROUP_RANK: str(group),
        env.ROLE_RANK: str(rank if server is None else server),
    }
    if server is not None:
        environment[env.DISTRIB_SERVER] = str(server)
        if "OMP_NUM_THREADS" not in options.environment:
            environment["OMP_NUM_THREADS"] = "1"  # OpenMP threads would spin beside the workers
    return environment


def socket_interface(interface: str | None) -> dict[str, str]:
    """Return the variables that keep Gloo and NCCL to one network interface.

    Args:
        interface: Name such as `eth0`; None for no restriction.
    """
    # Without the `=`, NCCL treats the name as a prefix: eth1 would also match eth10.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}


def complete(
    environment: Mapping[str, str],
    *,
    main: tuple[str, int],
    servers: Sequence[tuple[str, int]],
    address: str | None,
    interface: str | None,
) -> dict[str, str]:
    """Add what is known once every rank has connected to the launcher.

    Args:
        environment: Result of `planned`.
        main: Address and free port of rank 0.
        servers: Addresses and ports of the parameter servers.
        address: Address of this rank's host for other hosts; None if the job has one host.
        interface: Interface to use if preflight chose none.
    """
    added = {env.MASTER_ADDR: main[0], env.MASTER_PORT: str(main[1])}
    if servers:
        added[env.DISTRIB_SERVERS] = ",".join(f"{host}:{port}" for host, port in servers)
    if address is not None:
        added[env.DISTRIB_ADDRESS] = address
    return {**socket_interface(interface), **environment, **added}


def restarted(environment: Mapping[str, str]) -> dict[str, str]:
    """Mark the environment as that of a process that replaces one that died.

    Args:
        environment: Environment of the first process.
    """
    return {**environment, env.DISTRIB_RESTARTED: "1"}
