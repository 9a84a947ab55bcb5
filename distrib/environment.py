"""Names of the environment variables that the launcher sets for a rank, and of those that it sets for its own processes.

Every module takes the names from here. Standard library only: this module runs on every host.
"""

from __future__ import annotations

# Set for the script of every rank, with the names and meanings that torchrun gives them.
RANK = "RANK"
"""Global rank of a worker; parameter servers are numbered after the workers."""
WORLD_SIZE = "WORLD_SIZE"
"""Number of workers, parameter servers not included."""
LOCAL_RANK = "LOCAL_RANK"
"""Rank among the processes of this host."""
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""Number of workers on this host; for a parameter server, number of all processes."""
GROUP_RANK = "GROUP_RANK"
"""Index of this host in the plan."""
GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
"""Number of hosts."""
ROLE_RANK = "ROLE_RANK"
"""Rank among the processes of the same role: worker or server."""
ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
"""Number of processes of the same role."""
MASTER_ADDR = "MASTER_ADDR"
"""Address of rank 0, for `torch.distributed.init_process_group`."""
MASTER_PORT = "MASTER_PORT"
"""Free TCP port on the host of rank 0."""
TORCHELASTIC_RUN_ID = "TORCHELASTIC_RUN_ID"
"""Name of the job's first start; identical in all restarts."""
TORCHELASTIC_RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Number of restarts of the job so far."""
TORCHELASTIC_MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
"""Value of `--max-restarts`."""

TORCHRUN_VARIABLES = frozenset(
    [
        RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, ROLE_RANK, ROLE_WORLD_SIZE,
        MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID, TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_MAX_RESTARTS,
    ]
)  # fmt: skip
"""Variables of torchrun that the launcher sets; a user's own value of one of them is never passed on."""

# Set for the script of every rank.
DISTRIB_JOB = "DISTRIB_JOB"
"""Random name of this start of the job."""
DISTRIB_MODE = "DISTRIB_MODE"
"""Value of `--mode`: `sync`, `async` or `local`."""
DISTRIB_STRATEGY = "DISTRIB_STRATEGY"
"""JSON of the training strategy (`distrib.strategy.Strategy`)."""
DISTRIB_DEVICE = "DISTRIB_DEVICE"
"""Device of this rank: `cpu` or `cuda:N`."""
DISTRIB_ADDRESS = "DISTRIB_ADDRESS"
"""Address of this host on the network of the job; not set if the job has one host."""
DISTRIB_RUN_DIR = "DISTRIB_RUN_DIR"
"""Absolute path of the run directory."""
DISTRIB_STATUS_FD = "DISTRIB_STATUS_FD"
"""Pipe on which the script reports steps and metrics, one JSON object per line."""
DISTRIB_PROCESS_TAG = "DISTRIB_PROCESS_TAG"
"""`<job>.<rank>`: tags every process of a rank, so that the launcher finds and ends all of them."""

TORCHELASTIC_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""File to which the script's process writes its uncaught exception, as JSON in the format of torchrun."""

# Set for some ranks.
DISTRIB_RESULT_FD = "DISTRIB_RESULT_FD"
"""File to which the script writes its result: the pickled value of `distrib_launch.run`, or the JSON of `--profile`."""
DISTRIB_SHARE_GPUS = "DISTRIB_SHARE_GPUS"
"""`1` if ranks of a host may share a GPU, which NCCL does not support (`--share-gpus`)."""
DISTRIB_PROFILE = "DISTRIB_PROFILE"
"""JSON of the profile that `--profile` requests."""
DISTRIB_SERVERS = "DISTRIB_SERVERS"
"""Mode async: `address:port` of every parameter server, separated by commas."""
DISTRIB_SERVER = "DISTRIB_SERVER"
"""Mode async: index of this parameter server; set only for servers."""
DISTRIB_KEY = "DISTRIB_KEY"
"""Mode async: secret that authenticates the connections between workers and servers."""
DISTRIB_RESTARTED = "DISTRIB_RESTARTED"
"""Mode async: `1` for a worker or server that replaces one that died."""
DISTRIB_EVENTS_FD = "DISTRIB_EVENTS_FD"
"""Mode async: pipe on which the launcher reports deaths and restarts of ranks to a parameter server."""

# Set for the processes around the ranks and removed before the script starts.
DISTRIB_TOKEN = "DISTRIB_TOKEN"
"""Secret that authenticates the control channel."""
DISTRIB_CONTROL = "DISTRIB_CONTROL"
"""Addresses of the launcher's control channel, separated by commas."""
DISTRIB_FORWARDED = "DISTRIB_FORWARDED"
"""Prefix of variables that hold the scripts' environment as JSON (`rank_agent.forwarding`): it must not affect the engine."""
