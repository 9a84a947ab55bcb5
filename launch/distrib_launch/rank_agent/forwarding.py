"""Launcher's environment on its way to the scripts of all ranks: one rule for which variables are forwarded, and their encoding.

Variables that describe a host, a login session, or a process of a scheduler or MPI keep each host's own value. All others have the
launcher's value on every host, and those that only a host sets are left out. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from distrib.environment import DISTRIB_FORWARDED

HOST_VARIABLES = frozenset((
    "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "HOSTNAME", "HOST", "SHLVL", "_", "MAIL", "TMPDIR", "TMP", "TEMP",
    "DISPLAY", "WAYLAND_DISPLAY", "XAUTHORITY", "WINDOWID", "COLORTERM", "COLUMNS", "LINES", "TERM", "TERMINFO", "TERM_PROGRAM",
    "TERM_PROGRAM_VERSION", "TMUX", "TMUX_PANE", "STY", "SESSION_MANAGER", "INVOCATION_ID", "JOURNAL_STREAM", "KRB5CCNAME",
    "OPAL_PREFIX", "OPAL_USER_PARAMS_GIVEN", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK",
))  # fmt: skip
"""Variables of a host, a login session or a device allocation: each host keeps its own value."""
HOST_PREFIXES = (
    "XDG_", "DBUS_", "SSH_", "SUDO_", "BASH_FUNC_", "SLURM", "PBS_", "LSB_", "SGE_", "FLUX_", "PALS_", "KUBERNETES_", "PMI", "PRTE_", "OMPI_",
)  # fmt: skip
"""Prefixes of such variables, and of those of a scheduler's or MPI's process. mpirun itself sends OMPI_MCA_ settings to every rank."""
CHUNK_LENGTH = 100_000
"""Most characters in one variable: Linux allows 128 KiB (MAX_ARG_STRLEN)."""


def belongs_to_host(name: str) -> bool:
    """Return True if a variable keeps each host's own value.

    Args:
        name: Name of the variable.
    """
    return name in HOST_VARIABLES or name.startswith(HOST_PREFIXES)


def _names_installation(name: str) -> bool:
    """Return True for folders of one installation of Python, which a host with an interpreter of its own does not have."""
    return name in ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "VIRTUAL_ENV") or name.startswith("CONDA_")


def encode_environment(
    environ: Mapping[str, str], chosen: Mapping[str, str], interpreter: str, *, has_transport: bool = False
) -> dict[str, str]:
    """Encode the launcher's environment as variables of the engine: `DISTRIB_FORWARDED_0` and so on.

    Args:
        environ: Environment of the launcher.
        chosen: Variables that the user asked for, whatever their name; they win.
        interpreter: Python that runs the scripts on hosts without one of their own.
        has_transport: True if the engine itself hands `environ` to every rank, as srun does.
    """
    sent = {} if has_transport else {name: value for name, value in environ.items() if not belongs_to_host(name)}
    text = json.dumps({"keep": has_transport, "environ": sent, "chosen": dict(chosen), "interpreter": interpreter})
    starts = range(0, len(text), CHUNK_LENGTH)
    return {f"{DISTRIB_FORWARDED}_{n}": text[at : at + CHUNK_LENGTH] for n, at in enumerate(starts)}


def script_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a script: the launcher's variables, and this host's own ones.

    Args:
        environ: Environment of the rank agent, with the variables of `encode_environment`.
    """
    count = 0
    while f"{DISTRIB_FORWARDED}_{count}" in environ:
        count += 1
    sent = json.loads("".join(environ[f"{DISTRIB_FORWARDED}_{n}"] for n in range(count)))
    is_elsewhere = sys.executable != sent["interpreter"]
    found = {
        name: value
        for name, value in environ.items()
        if sent["keep"] or belongs_to_host(name) or (is_elsewhere and _names_installation(name))
    }
    found |= {
        name: value for name, value in sent["environ"].items() if not (is_elsewhere and _names_installation(name))
    }
    found = {name: value for name, value in found.items() if not name.startswith("DISTRIB_")}
    found.update(sent["chosen"])
    prefix = environ.get("PMIX_PREFIX")  # from PRRTE: the folder of an Open MPI
    if prefix and prefix != os.path.dirname(os.path.dirname(sys.executable)):  # noqa: PTH120 (as PRRTE writes it)
        folders = found.get("LD_LIBRARY_PATH"), f"{prefix}/lib"  # for an mpi4py that does not know where its MPI is
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, folders))
    return found
