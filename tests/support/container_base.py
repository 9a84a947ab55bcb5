"""Base image for tests of containers, made of this machine's own Debian packages, because tests may reach no registry of images."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path

STATUS = Path("/var/lib/dpkg/status")
WANTED = ("apt", "ca-certificates", "openssh-client", "openssh-server", "python3", "python3-venv", "rsync")


def installed_closure(status: str, wanted: tuple[str, ...] = WANTED) -> dict[str, str]:
    """Return the essential packages, those wanted, and all that they depend on, each with its part of dpkg's status.

    Args:
        status: Content of dpkg's status file.
        wanted: Names of packages.
    """
    found, needs, provided = {}, {}, {}
    for block in status.strip().split("\n\n"):
        fields = dict(re.findall(r"^([A-Z][\w-]*): (.*)$", block, re.MULTILINE))
        if not fields.get("Status", "").endswith(" ok installed"):
            continue
        name = fields["Package"]
        found[name] = block
        needs[name] = re.findall(
            r"(?:^|[,|]) *([a-z0-9][\w.+-]+)", f"{fields.get('Depends', '')},{fields.get('Pre-Depends', '')}"
        )
        for virtual in re.findall(r"(?:^|,) *([a-z0-9][\w.+-]+)", fields.get("Provides", "")):
            provided.setdefault(virtual, []).append(name)
    todo = [*wanted, *(name for name, block in found.items() if "\nEssential: yes" in block)]
    chosen: dict[str, str] = {}
    while todo:
        name = todo.pop()
        for package in [name] if name in found else provided.get(name, []):
            if package not in chosen:
                chosen[package] = found[package]
                todo += needs[package]
    return chosen


def write_base(archive: Path) -> None:
    """Write the files of the packages as a tar archive, the root file system of an image.

    It has no sources of packages, so that apt-get in a build needs no network.

    Args:
        archive: File to write.
    """
    packages = installed_closure(STATUS.read_text())
    listed = subprocess.run(["dpkg-query", "-L", *packages], capture_output=True, text=True, check=True).stdout
    paths = {path for path in map(Path, listed.splitlines()) if path.is_absolute()}
    for extra in ("/etc/passwd", "/etc/group", "/etc/ssl", "/etc/alternatives", "/var/lib/dpkg/alternatives"):
        paths |= {Path(extra), *Path(extra).rglob("*")}
    paths |= set(Path("/lib/x86_64-linux-gnu").glob("ld-*")) | {
        Path(path) for path in ("/bin", "/sbin", "/lib", "/lib64")
    }
    names = {str(path.parent.resolve() / path.name) for path in paths if path.exists() or path.is_symlink()}
    with tarfile.open(archive, "w") as tar:
        for name in sorted(names - {"/", str(STATUS)}):
            if not name.startswith(("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/")):
                tar.add(name, recursive=False)
        status = archive.with_name("status")
        status.write_text("\n\n".join(packages.values()) + "\n")
        tar.add(status, str(STATUS))
        for shadow in sorted({"/etc/shadow", "/etc/gshadow"} - names):
            empty = archive.with_name("empty")
            empty.write_text("")
            tar.add(empty, shadow)
