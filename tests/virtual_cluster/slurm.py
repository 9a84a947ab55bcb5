"""Slurm on the virtual cluster: a real slurmctld on the first host, a real slurmd on every host.

Uses Debian's packages slurmctld, slurmd, slurm-client and munge. Keys, sockets, spool folders and configuration
belong to the cluster and are removed with it. A Slurm of the machine is neither read nor changed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.virtual_cluster.virtual import Cluster
from tests.virtual_cluster.virtual import why_unavailable as why_no_cluster

DAEMONS = ("munged", "slurmctld", "slurmd")
CONFIGURATION = """\
ClusterName={name}
SlurmctldHost={first}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge/socket
CredType=cred/munge
StateSaveLocation={directory}/slurm/state
SlurmdSpoolDir={directory}/slurm/spool-%n
SlurmctldPidFile={directory}/slurm/slurmctld.pid
SlurmdPidFile={directory}/slurm/slurmd-%n.pid
SlurmctldLogFile={directory}/slurm/slurmctld.log
SlurmdLogFile={directory}/slurm/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
ReturnToService=2
TmpFS={directory}/slurm/tmp-%n
MailProg=/bin/true
KillWait=5
PluginDir={plugins}
PlugStackConfig={directory}/slurm/plugstack.conf
GresTypes=gpu
NodeName={nodes} CPUs={cpus} Gres={gres} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_unavailable() -> str | None:
    """Return the reason why Slurm cannot run on a virtual cluster here, or None."""
    if why := why_no_cluster():
        return why
    for tool, package in (
        ("munged", "munge"),
        ("slurmctld", "slurmctld"),
        ("slurmd", "slurmd"),
        ("srun", "slurm-client"),
    ):
        if shutil.which(tool) is None and not Path("/usr/sbin", tool).exists():
            return f"needs {tool} (Debian: {package})"
    return None


class SlurmCluster(Cluster):
    """Virtual cluster whose hosts are the nodes of its own Slurm, with `slots` CPUs each.

    Each node has `gpus` fake GPUs, represented by other device files.
    Commands started with `run` and `popen` use this Slurm (SLURM_CONF). `processes` omits its daemons.
    """

    def __init__(
        self, hosts: int, *, slots: int = 1, gpus: int = 0, second_rates: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(hosts, slots=slots, second_rates=second_rates)
        self.gpus = gpus

    def up(self) -> None:
        self._daemons: list[subprocess.Popen[bytes]] = []
        super().up()
        self._configure()
        for host in self.hosts:
            if host == self.hosts[0]:
                self._start_munge()
                self._daemon(host, "/usr/sbin/slurmctld", "-D")
            self._daemon(host, "/usr/sbin/slurmd", "-D", "-N", host)
        self._wait_idle()

    def down(self) -> None:
        super().down()
        for process in self._daemons:
            process.wait()
        self._daemons.clear()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that select this Slurm."""
        return {"SLURM_CONF": str(self._slurm / "slurm.conf")}

    def popen(
        self,
        host: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.Popen[str]:
        return super().popen(host, command, env={**self.environment, **(env or {})}, cwd=cwd)

    def processes(self, host: str) -> dict[int, str]:
        return {
            pid: command
            for pid, command in super().processes(host).items()
            if Path(command.partition(" ")[0].rstrip(":")).name not in DAEMONS
        }

    def jobs(self) -> list[str]:
        """List the unfinished jobs of Slurm, each as `id name state`."""
        return self.run(self.hosts[0], ["squeue", "--noheader", "--format=%i %j %T"], check=True).stdout.splitlines()

    def logs(self) -> str:
        """Return the logs of Slurm's daemons, for the message of a failed test."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._slurm.glob("*.log")))

    # -- internals --------------------------------------------------------------------------------------------------

    @property
    def _slurm(self) -> Path:
        return self.directory / "slurm"

    def _configure(self) -> None:
        munge = self.directory / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        (self._slurm / "state").mkdir(parents=True, mode=0o755)
        (self._slurm / "plugstack.conf").touch()
        (self._slurm / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self._slurm}/cgroup\n")
        for host in self.hosts:
            (self._slurm / f"spool-{host}").mkdir()
            (self._slurm / f"tmp-{host}").mkdir()  # in a shared one, the second PMIx server fails
        files = "".join(f"Name=gpu File=/dev/tty{number}\n" for number in range(self.gpus))
        (self._slurm / "gres.conf").write_text(files)
        plugins = next(Path("/usr/lib").glob("*/slurm-wlm"), Path("/usr/lib/slurm"))
        (self._slurm / "slurm.conf").write_text(
            CONFIGURATION.format(
                name=self.name,
                first=self.hosts[0],
                directory=self.directory,
                plugins=plugins,
                nodes=",".join(self.hosts),
                cpus=self.slots,
                gres=f"gpu:{self.gpus}" if self.gpus else "",
            )
        )

    def _daemon(self, host: str, *command: str) -> None:
        with (self.directory / f"{Path(command[0]).name}-{host}.start").open("wb") as log:
            process = subprocess.Popen(
                self.enter(host, command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                cwd="/", env={**os.environ, **self.environment},
            )  # fmt: skip
        self._daemons.append(process)

    def _start_munge(self) -> None:
        munge = self.directory / "munge"
        # One munged serves every host through its socket, because the hosts share the file system.
        self._daemon(
            self.hosts[0], "/usr/sbin/munged", "--foreground", "--force", f"--key-file={munge}/key",
            f"--socket={munge}/socket", f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed",
        )  # fmt: skip
        deadline = time.monotonic() + 10
        while not (munge / "socket").exists():
            if time.monotonic() > deadline:
                raise RuntimeError(f"munged did not start: {self._words('munged', self.hosts[0])}")
            time.sleep(0.02)

    def _wait_idle(self) -> None:
        deadline = time.monotonic() + 30
        while True:
            states = self.run(self.hosts[0], ["sinfo", "--noheader", "--Node", "--format=%N %t"]).stdout.split()
            if states[1::2] == ["idle"] * len(self.hosts):
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"Slurm's nodes are not idle: {states}\n{self.logs()}")
            time.sleep(0.2)

    def _words(self, daemon: str, host: str) -> str:
        return (self.directory / f"{daemon}-{host}.start").read_text().strip()
