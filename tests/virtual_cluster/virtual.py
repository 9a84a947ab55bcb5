"""Virtual hosts: Linux namespaces joined by links of a chosen rate.

Every host has its own network, UTS, IPC and mount namespace: its own hostname, hosts file, `/dev/shm`, sshd and one
NIC `eth0`, plugged into a bridge in a namespace of its own. Hosts share the file system and the process numbers with
the machine. Addresses come from 198.18.0.0/15 (RFC 2544, reserved for benchmarks) and never leave the namespaces.
Needs root, iproute2 and sshd. Outside the namespaces, only `/etc/netns/<name>` changes, and `down` removes it.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

STATE_ROOT = Path("/run/distrib-cluster")
HOME_SSH = Path.home() / ".ssh"
STARTUP_FILE = Path.home() / ".bashrc"
HIDE_STARTUP_FILE = f"mount --bind /dev/null {STARTUP_FILE} && " if STARTUP_FILE.exists() else ""
"""Bash reads this file in every ssh session; that of a developer may take longer than the session."""
OWN_NAMES = f"dc{os.getpid()}-"
"""Name prefix of the clusters that this process builds. Clusters of other processes may be up at the same time."""

UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


class ClusterUnavailable(Exception):
    """Error: this machine cannot build a virtual cluster."""


def why_unavailable() -> str | None:
    """Return the reason why no virtual cluster can be built here, or None."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("ip", "tc", "nft", "nsenter", "unshare", "ssh", "ssh-keygen"):
        if shutil.which(tool) is None:
            return f"needs the command {tool}"
    if not Path("/usr/sbin/sshd").exists():
        return "needs /usr/sbin/sshd"
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return None if probe.returncode == 0 else f"needs network namespaces ({probe.stderr.strip()})"


def parse_rate(text: str) -> int:
    """Return the bits per second of a rate as `tc` writes it: `1gbit`, `200mbit`."""
    for unit in sorted(UNITS, key=len, reverse=True):
        if text.endswith(unit):
            return int(float(text[: -len(unit)]) * UNITS[unit])
    raise ValueError(f"{text!r} is no rate such as 200mbit or 1gbit")


def _sh(*command: str, check: bool = True, text: str | None = None) -> str:
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    if check and result.returncode:
        raise RuntimeError(f"{shlex.join(command)}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


class Cluster:
    """Cluster of `hosts` virtual hosts named n1, n2, ... (or `prefix`1, ...) with `slots` slots each.

    `rate` shapes every host's link in both directions (None: unshaped, tens of Gb/s). `rates` overrides it by host.
    `racks` are hosts that share a bridge of their own. An uplink of `trunk_rate` joins it to the others.
    `second_rates`: hosts with a second NIC `eth1` of that rate, on a separate network (198.19.0.0/16).
    `login_environment`: variables of every SSH session.
    Use it as a context manager, or call `up` and `down`. After `up`, `hostfile` lists the hosts, and `directory` is a
    scratch folder that every host sees.
    """

    def __init__(
        self,
        hosts: int,
        *,
        slots: int = 1,
        rate: str | None = None,
        rates: Mapping[str, str] | None = None,
        racks: Sequence[Sequence[str]] = (),
        trunk_rate: str | None = None,
        second_rates: Mapping[str, str] | None = None,
        login_environment: Mapping[str, str] | None = None,
        prefix: str = "n",
        name: str | None = None,
    ) -> None:
        self.name = name or OWN_NAMES + secrets.token_hex(3)
        self.hosts = [f"{prefix}{i}" for i in range(1, hosts + 1)]
        self.slots = slots
        self.rates: dict[str, str | None] = {host: (rates or {}).get(host, rate) for host in self.hosts}
        self.racks = [list(rack) for rack in racks]
        self.trunk_rate = trunk_rate
        self.second_rates = dict(second_rates or {})
        self.login_environment = dict(login_environment or {})
        self.directory = STATE_ROOT / self.name
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}

    # -- lifecycle ----------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.down()

    def up(self) -> None:
        """Build namespaces, links and sshds. Return when every sshd accepts connections."""
        if why := why_unavailable():
            raise ClusterUnavailable(why)
        self.directory.mkdir(parents=True)
        self.directory.chmod(0o755)
        self._write_state()
        self._write_ssh()
        HOME_SSH.mkdir(mode=0o700, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        self.hostfile.write_text("".join(f"{host} slots={self.slots}\n" for host in self.hosts))
        _sh("ip", "netns", "add", self.switch_namespace)
        commands = ["link set lo up", "link add br0 type bridge", "link set br0 up"]
        if self.second_rates:
            commands += ["link add second type bridge", "link set second up"]
        for number in range(1, len(self.racks) + 1):
            commands += [
                f"link add br{number} type bridge", f"link set br{number} up",
                f"link add up{number} type veth peer name down{number}",
                f"link set up{number} master br{number} up", f"link set down{number} master br0 up",
            ]  # fmt: skip
        _sh("ip", "-n", self.switch_namespace, "-batch", "-", text="\n".join(commands))
        for number in range(1, len(self.racks) + 1):
            for device in (f"up{number}", f"down{number}"):
                self._limit(self.switch_namespace, device, self.trunk_rate)
        for index, host in enumerate(self.hosts, start=1):
            _sh("ip", "netns", "add", self.namespace(host))
            _sh("ip", "link", "add", "eth0", "netns", self.namespace(host), "type", "veth",
                "peer", "name", f"p{index}", "netns", self.switch_namespace)  # fmt: skip
            _sh("ip", "-n", self.switch_namespace, "link", "set", f"p{index}", "master", self._bridge(host), "up")
            lines = ["link set lo up", f"address add {self.address(host)}/16 dev eth0", "link set eth0 up"]
            _sh("ip", "-n", self.namespace(host), "-batch", "-", text="\n".join(lines))
            self.shape(host, self.rates[host])
            if host in self.second_rates:
                self._add_second_card(host, index)
            etc = Path("/etc/netns") / self.namespace(host)
            etc.mkdir(parents=True)
            self.write_hosts_file(host)
            self._start_sshd(host)
        for host in self.hosts:
            self._wait_sshd(host)

    def down(self) -> None:
        """Kill all processes on the hosts and remove every trace. Safe to call at any time, and twice."""
        for host in self.hosts:
            self._kill_all(host)
        for namespace in [*map(self.namespace, self.hosts), self.switch_namespace]:
            if Path("/run/netns", namespace).exists():
                _sh("ip", "netns", "delete", namespace, check=False)
            shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    @classmethod
    def load(cls, name: str) -> Cluster:
        """Load a cluster that another process built with `up`."""
        state = json.loads((STATE_ROOT / name / "state.json").read_text())
        cluster = cls(len(state["rates"]), slots=state["slots"], name=name)
        cluster.rates = state["rates"]
        cluster.hosts = list(cluster.rates)
        return cluster

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def hostfile(self) -> Path:
        return self.directory / "hosts.txt"

    def namespace(self, host: str) -> str:
        return f"{self.name}-{host}"

    def address(self, host: str, card: int = 0) -> str:
        index = self.hosts.index(host) + 1
        return f"198.{18 + card}.{index // 250}.{index % 250}"

    def processes(self, host: str) -> dict[int, str]:
        """Return the processes of a host without its sshd listener: process number to command line."""
        keep = self.listener_process(host)
        found = {}
        for pid in map(int, _sh("ip", "netns", "pids", self.namespace(host), check=False).split()):
            try:
                stat = Path(f"/proc/{pid}/stat").read_text()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if pid != keep and stat.rpartition(")")[2].split()[0] != "Z":
                found[pid] = command.strip()
        return found

    def left_over(self, *, within_seconds: float = 0.0) -> dict[str, dict[int, str]]:
        """Return the processes that remain on the hosts, after waiting up to `within_seconds` for their end."""
        deadline = time.monotonic() + within_seconds
        while True:
            found = {host: p for host in self.hosts if (p := self.processes(host))}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    # -- commands on hosts ----------------------------------------------------------------------------------------

    def enter(
        self, host: str, command: Sequence[str | os.PathLike[str]], *, cwd: str | os.PathLike[str] | None = None
    ) -> list[str]:
        """Return the command line that runs `command` on `host` as a login does, in `cwd` or the current directory."""
        directory = f"--wd={Path(cwd or '.').absolute()}"
        return [
            "nsenter",
            directory,
            "-t",
            str(self.listener_process(host)),
            "-n",
            "-u",
            "-m",
            "-i",
            "--",
            *map(str, command),
        ]

    def run(
        self,
        host: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        timeout: float = 120,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end and capture its output as text."""
        with self.popen(host, command, env=env, cwd=cwd) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                raise AssertionError(
                    f"{shlex.join(map(str, command))} on {host}: no end after {timeout} s\n{out}\n{err}"
                ) from None
        if check and process.returncode:
            raise RuntimeError(f"{shlex.join(map(str, command))} on {host}: exit {process.returncode}\n{out}\n{err}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def popen(
        self,
        host: str,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host, with pipes for its standard output and error."""
        return subprocess.Popen(
            self.enter(host, command, cwd=cwd), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, errors="replace", env={**os.environ, **(env or {})}, cwd=cwd,
        )  # fmt: skip

    # -- faults -------------------------------------------------------------------------------------------------

    def shape(self, host: str, rate: str | None) -> None:
        """Set a host's link rate in both directions; None lifts the limit."""
        self.rates[host] = rate
        port = f"p{self.hosts.index(host) + 1}"
        for namespace, device in ((self.namespace(host), "eth0"), (self.switch_namespace, port)):
            self._limit(namespace, device, rate)

    def cut(self, host: str) -> None:
        """Take a host's link down. Its processes continue."""
        _sh("ip", "-n", self.switch_namespace, "link", "set", f"p{self.hosts.index(host) + 1}", "down")

    def lose(self, host: str) -> None:
        """Simulate the power loss of a host: take its link down, then kill every process on it."""
        self.cut(host)
        self._kill_all(host)

    def restore(self, host: str) -> None:
        """Restore a cut or lost host: its link carries frames again, and its sshd runs."""
        port = f"p{self.hosts.index(host) + 1}"
        _sh("ip", "-n", self.switch_namespace, "link", "set", port, "up")
        self._wait_link(host, port)
        for other in self.hosts:  # an address that did not reply stays unreachable for seconds
            if other != host:
                _sh("ip", "-n", self.namespace(other), "neigh", "flush", "to", self.address(host), check=False)
        if not (self.directory / f"{host}.pid").exists():  # lost, maybe through another process
            self._start_sshd(host)
            self._wait_sshd(host)

    def wall(self, host: str, *, ports: str = "22", hook: str = "input", verdict: str = "drop") -> None:
        """Install a permanent firewall on a host's eth0 that admits only ssh, or connections to the given ports.

        `hook`: `output` filters outgoing connections. `verdict`: ufw and clouds drop packets,
        firewalld uses `reject with icmpx admin-prohibited`.
        """
        way = "iifname" if hook == "input" else "oifname"
        _sh("ip", "netns", "exec", self.namespace(host), "nft", "-f", "-", text=f"""table inet wall {{ chain {hook} {{
            type filter hook {hook} priority filter
            {way} eth0 tcp dport != {{ {ports} }} tcp flags & (syn | ack) == syn {verdict};
        }}; }}""")  # fmt: skip

    def part(self, host: str, other: str) -> None:
        """Drop all packets between the eth0 of two hosts. Both still reach all other hosts."""
        _sh("ip", "netns", "exec", self.namespace(host), "nft", "-f", "-", text=f"""table inet parted {{
            chain input {{ type filter hook input priority filter; ip saddr {self.address(other)} drop; }};
            chain output {{ type filter hook output priority filter; ip daddr {self.address(other)} drop; }};
        }}""")  # fmt: skip

    def raise_mtu(self, narrow: str, mtu: int = 9000) -> None:
        """Set jumbo frames on all hosts and their bridge ports, except the port of the host `narrow`.

        This simulates a switch with one forgotten port: it passes short packets and drops longer ones silently.
        """
        for number, host in enumerate(self.hosts, start=1):
            # Disable GSO, because a port passes segments that the kernel merged, however long they are.
            _sh("ip", "-n", self.namespace(host), "link", "set", "eth0", "mtu", str(mtu), "gso_max_segs", "1")
            if host != narrow:
                _sh("ip", "-n", self.switch_namespace, "link", "set", f"p{number}", "mtu", str(mtu))

    def write_hosts_file(self, host: str, *, own_address: str | None = None) -> None:
        """Write the host's /etc/hosts, its own name pointing at `own_address` if given (as Debian's installer does)."""
        lines = ["127.0.0.1 localhost"]
        for other in self.hosts:
            lines.append(f"{own_address if other == host and own_address else self.address(other)} {other}")
        path = Path("/etc/netns") / self.namespace(host) / "hosts"
        path.write_text("\n".join(lines) + "\n")

    # -- internals --------------------------------------------------------------------------------------------------

    def _wait_link(self, host: str, port: str) -> None:
        """Wait until both ends and the bridge report the carrier, on a busy machine up to a second later."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            (far,) = json.loads(_sh("ip", "-n", self.switch_namespace, "-d", "-j", "link", "show", port))
            (near,) = json.loads(_sh("ip", "-n", self.namespace(host), "-j", "link", "show", "eth0"))
            forwards = far["linkinfo"]["info_slave_data"]["state"] == "forwarding"
            if forwards and far["operstate"] == near["operstate"] == "UP":
                return
            time.sleep(0.02)
        raise RuntimeError(f"the link of {host} is not up after 10 s")

    @property
    def switch_namespace(self) -> str:
        return f"{self.name}-net"

    def _add_second_card(self, host: str, index: int) -> None:
        namespace, port = self.namespace(host), f"s{index}"
        _sh(
            "ip",
            "link",
            "add",
            "eth1",
            "netns",
            namespace,
            "type",
            "veth",
            "peer",
            "name",
            port,
            "netns",
            self.switch_namespace,
        )
        _sh("ip", "-n", self.switch_namespace, "link", "set", port, "master", "second", "up")
        _sh("ip", "-n", namespace, "address", "add", f"{self.address(host, 1)}/16", "dev", "eth1")
        _sh("ip", "-n", namespace, "link", "set", "eth1", "up")
        for where, device in ((namespace, "eth1"), (self.switch_namespace, port)):
            self._limit(where, device, self.second_rates[host])

    def _bridge(self, host: str) -> str:
        return next((f"br{number}" for number, rack in enumerate(self.racks, 1) if host in rack), "br0")

    @staticmethod
    def _limit(namespace: str, device: str, rate: str | None) -> None:
        """Limit the outgoing rate of a device."""
        _sh("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root", check=False)
        if rate is not None:
            # One millisecond's worth of bytes, and at least two of the 64 KiB packets that veth passes whole.
            burst = max(128 * 1024, parse_rate(rate) // 8 // 1000)
            _sh("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf",
                "rate", rate, "burst", str(burst), "latency", "50ms")  # fmt: skip

    def _write_state(self) -> None:
        (self.directory / "state.json").write_text(json.dumps({"slots": self.slots, "rates": self.rates}))

    def _write_ssh(self) -> None:
        ssh = self.directory / "ssh"
        ssh.mkdir(mode=0o700)
        for key in ("id_ed25519", "host_key"):
            _sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.name, "-f", str(ssh / key))
        shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
        algorithm, key = (ssh / "host_key.pub").read_text().split()[:2]
        names = ",".join(name for host in self.hosts for name in (host, self.address(host)))
        (ssh / "known_hosts").write_text(f"{names} {algorithm} {key}\n")
        variables = " ".join(f"{name}={value}" for name, value in self.login_environment.items())
        (ssh / "sshd_config").write_text(
            f"HostKey {self.directory}/ssh/host_key\nAuthorizedKeysFile {self.directory}/ssh/authorized_keys\n"
            "PidFile none\nUsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            "KbdInteractiveAuthentication no\nMaxStartups 200\nMaxSessions 200\nPrintMotd no\nUseDNS no\n"
            "KexAlgorithms curve25519-sha256\n"  # half of the CPU time of the default
            + (f"SetEnv {variables}\n" if variables else "")
        )

    def _start_sshd(self, host: str) -> None:
        sshd = shlex.join(["/usr/sbin/sshd", "-D", "-f", f"{self.directory}/ssh/sshd_config",
                           "-E", f"{self.directory}/sshd-{host}.log"])  # fmt: skip
        setup = (
            f"hostname {host} && mount -t tmpfs -o size=2g tmpfs /dev/shm && "
            f"mount --bind {self.directory}/ssh {HOME_SSH} && {HIDE_STARTUP_FILE}"
            f"echo $$ > {self.directory}/{host}.pid && exec {sshd}"
        )
        self._sshds[host] = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", "--ipc", "--mount",
             "--propagation", "private", "sh", "-c", setup],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            cwd="/",
        )  # fmt: skip

    def _wait_sshd(self, host: str) -> None:
        deadline = time.monotonic() + 20
        log = self.directory / f"sshd-{host}.log"
        while not (log.exists() and "listening" in log.read_text()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"sshd of {host} did not start: {log.read_text() if log.exists() else 'no log'}")
            time.sleep(0.01)

    def listener_process(self, host: str) -> int:
        try:
            return int((self.directory / f"{host}.pid").read_text())
        except (OSError, ValueError):
            return -1

    def _kill_all(self, host: str) -> None:
        for _ in range(100):
            pids = _sh("ip", "netns", "pids", self.namespace(host), check=False).split()
            if not pids:
                break
            for pid in map(int, pids):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.02)
        if sshd := self._sshds.pop(host, None):
            sshd.kill()  # it may not have entered its namespace yet
            sshd.wait()
        (self.directory / f"{host}.pid").unlink(missing_ok=True)
        (self.directory / f"sshd-{host}.log").unlink(missing_ok=True)


def names() -> list[str]:
    """Return the names of the clusters that are up on this machine."""
    return sorted(p.name for p in STATE_ROOT.iterdir()) if STATE_ROOT.exists() else []
