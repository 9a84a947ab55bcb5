"""Hostfiles and host lists of every dialect: hosts, errors, notes, files on disk."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distrib.cluster.hostfile import (
    DIALECTS,
    Host,
    HostfileDialect,
    HostList,
    parse_host_list,
    parse_hostfile,
    read_hostfile,
)
from distrib.cluster.hosts import Notes, SourcePlace
from distrib.errors import HostfileError
from tests.conftest import ROOT
from tests.support.hostfile_tables import TABLES, h, hosts_of

EXAMPLES = ROOT / "hostfiles"


def error_of(parse: Callable[..., HostList], *arguments: str) -> HostfileError:
    try:
        parse(*arguments)
    except HostfileError as error:
        return error
    pytest.fail(f"accepted: {arguments}")


@pytest.mark.parametrize("subject", TABLES["valid_files"])
def test_a_valid_hostfile_gives_its_hosts_and_dialect(subject: str) -> None:
    for dialect, text, hosts in TABLES["valid_files"][subject]:
        read = parse_hostfile(text, "hosts.txt")
        assert list(read.hosts) == hosts_of(hosts, 1), text
        assert (read.dialect, read.source) == (dialect, "hosts.txt"), text


@pytest.mark.parametrize("subject", TABLES["invalid_files"])
def test_an_invalid_hostfile_is_refused_with_line_and_column(subject: str) -> None:
    for text, line, column, message in TABLES["invalid_files"][subject]:
        error = error_of(parse_hostfile, text, "hosts.txt")
        assert message in str(error), text
        assert (error.source, error.line, error.column) == ("hosts.txt", line, column), text
        assert "\n" not in str(error), text


def test_an_error_quotes_long_text_in_part() -> None:
    assert len(str(error_of(parse_hostfile, "node1 slots=" + "9" * 5000, "hosts.txt"))) < 300


def test_a_valid_host_list_gives_its_hosts() -> None:
    for text, hosts in TABLES["valid_lists"]:
        read = parse_host_list(text)
        assert list(read.hosts) == hosts_of(hosts, 0), text
        assert (read.dialect, read.source) == ("inline", "-H"), text


def test_an_invalid_host_list_is_refused_with_its_column() -> None:
    for text, column, message in TABLES["invalid_lists"]:
        error = error_of(parse_host_list, text)
        assert message in str(error), text
        assert (error.source, error.line, error.column) == ("-H", 0, column), text


def test_similar_notes_are_merged() -> None:
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
def test_ambiguous_text_is_noted(text: str, note: str) -> None:
    assert [found[: len(note)] for found in parse_hostfile(text, "hosts.txt").notes] == [note]


@pytest.mark.parametrize("text", ["a:4", "a slots=22", "a port=22", "2001:db8:0:0:0:0:0:4", "n[1-4]", "a\nb"])
def test_unambiguous_text_has_no_notes(text: str) -> None:
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


def test_a_hostfile_is_read_from_disk(tmp_path: Path) -> None:
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
def test_a_file_of_another_format_is_refused(tmp_path: Path, data: bytes, line: int, message: str) -> None:
    path = tmp_path / "hosts.txt"
    path.write_bytes(data)
    with pytest.raises(HostfileError, match=message) as caught:
        read_hostfile(path)
    assert (caught.value.source, caught.value.line) == (str(path), line)
    assert caught.value.hint


def test_an_unreadable_hostfile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_hostfile_from_a_pipe_can_be_read_again() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"n1 slots=2\nn2\n")
    os.close(writer)
    first, second = (read_hostfile(f"/dev/fd/{reader}") for _ in range(2))
    os.close(reader)
    assert [host.name for host in first.hosts] == ["n1", "n2"] and second == first


def test_a_topology_file_in_place_of_a_hostfile_is_refused():
    with pytest.raises(HostfileError, match="this is a topology file"):
        read_hostfile(EXAMPLES / "mixed-gpus.yaml")


def test_the_examples_are_hostfiles() -> None:
    assert read_hostfile(EXAMPLES / "localhost.txt").hosts[0].name == "localhost"
    cluster = read_hostfile(EXAMPLES / "cluster.txt")
    assert [(host.name, host.slots) for host in cluster.hosts] == [(f"node{i}", 8) for i in range(1, 5)]
    assert (cluster.dialect, cluster.notes) == ("openmpi", ())


def test_every_setting_of_the_example_is_valid() -> None:
    text = (EXAMPLES / "cluster.txt").read_text()
    keys = [line.split()[1] for line in text.splitlines() if line.startswith("#     ") and "=" in line.split()[1]]
    assert len(keys) == 6
    assert parse_hostfile("a " + " ".join(keys), "x").hosts[0].role == "server"


@pytest.mark.processes
def test_importing_the_parser_loads_no_clustershell_torch_or_yaml() -> None:
    code = "import sys, distrib.cluster.hostfile; print(*{'ClusterShell', 'torch', 'yaml'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent)
    assert done.stdout.strip() == ""
