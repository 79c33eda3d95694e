"""`dcpctl verify`: the files of a data folder beside log and store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from clients.testing import ServerStartError
from dcp.server.access import users_file
from dcp.server.access.users import USERS_FILE, Users
from dcp.server.access.users_file import UsersFileError, replace_file
from dcp.server.check import verify as shell
from dcp.server.check.folder_files import NotRead, check_files
from dcp.server.cluster.cluster_file import (
    SECRET_BYTES,
    ClusterFile,
    begin_incarnation,
    read_cluster_file,
    write_cluster_file,
)
from dcp.server.cluster.node_map import MAP_FILE, MapContent
from dcp.server.cluster.receipt_files import FORMER_DISCARD_FOLDER, keep_cut_off, keep_election
from dcp.server.cluster.seen_file import SEEN_FILE
from dcp.server.storage.folder import CLUSTER_FILE, FolderError
from support.server import DcpdProcess
from support.stored_bytes import pack_mutation
from vbucket.check.finding import Kind
from vbucket.model.receipt import CutOff, ElectionLoss


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a member that has lost something, with one user."""
    path = tmp_path_factory.mktemp("files") / "data"
    with DcpdProcess(path) as server:
        assert server.stop() == 0
    Users(path / USERS_FILE, iterations=1).add("ada", "correct-horse")
    entry = pack_mutation(vb_id=3, key=b"\0k", value=b"v", seqno=7, cas=1, rev_seqno=1)
    keep_cut_off(path, CutOff(3, 2, ((5, 0),), (entry,)))
    keep_election(path, ElectionLoss(4, 3, ((6, 0),), 9, 8), 12.5)
    return path


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def member(folder: Path) -> Path:
    content = ClusterFile(
        cluster="c1", meta="embedded://127.0.0.1:4711", secret="s" * SECRET_BYTES, name="a"
    )
    write_cluster_file(folder, content)
    told = MapContent(cluster="c1", life=1, rev=9)
    (folder / MAP_FILE).write_bytes(msgspec.json.encode(told))
    records = {"partition/3": ('{"master":"a"}', 7)}
    seen = {"format": 1, "cluster": "c1", "revision": 9, "records": records}
    (folder / SEEN_FILE).write_bytes(msgspec.json.encode(seen))
    return folder


def spoil(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


def files_found(folder: Path) -> dict[str, str]:
    items = list(check_files(folder))
    assert all(item.kind == Kind.FILE for item in items if not isinstance(item, NotRead))
    return {item.where: item.what for item in items if not isinstance(item, NotRead)}


def test_sound_files_have_no_finding(member: Path) -> None:
    assert files_found(member) == {}


@pytest.mark.parametrize(
    ("name", "old", "new", "what"),
    [
        (USERS_FILE, b'"iterations": 1', b'"iterations": 3', "the checksum is wrong"),
        (USERS_FILE, b"{", b"[", "is damaged"),
        (CLUSTER_FILE, b"embedded:", b"embeddee:", "is not possible: no such kind"),
        (CLUSTER_FILE, b":4711", b":471x", "is not possible"),
        (CLUSTER_FILE, b"s" * 20, b"s", "secret"),
        (CLUSTER_FILE, b'"secret"', b'"secreu"', "unknown field `secreu`"),
        (CLUSTER_FILE, b'"format": 1', b'"format": 9', "it has format 9, this dcpd reads format 1"),
        (MAP_FILE, b'"rev"', b'"rew"', "unknown field `rew`"),
        (MAP_FILE, b'"c1"', b'"c3"', "it is of the cluster c3, and cluster.json of c1"),
        (SEEN_FILE, b'"c1"', b'"c3"', "it is of the cluster c3, and cluster.json of c1"),
        (SEEN_FILE, b'"records"', b'"recorda"', "unknown field `recorda`"),
        (SEEN_FILE, b'"format":1', b'"format":2', "it has format 2, this dcpd reads format 1"),
        (SEEN_FILE, b'"{', b'"[', "its record partition/3 cannot be read"),
    ],
)
def test_a_damaged_file_is_named(
    member: Path, name: str, old: bytes, new: bytes, what: str
) -> None:
    spoil(member / name, old, new)
    found = files_found(member)
    assert list(found) == [name]
    assert what in found[name]


def test_every_flipped_byte_of_a_cut_is_found(member: Path) -> None:
    (path,) = (member / "discarded").glob("*.cut")
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert list(files_found(member)) == [f"discarded/{path.name}"], at
    path.write_bytes(data)
    copy = path.with_name(path.name.replace("epoch2", "epoch3"))
    path.rename(copy)
    assert files_found(member) == {f"discarded/{copy.name}": f"it is a copy of {path.name}"}


def test_the_folder_of_the_version_before_is_read(member: Path) -> None:
    former = (member / "discarded").rename(member / FORMER_DISCARD_FOLDER)
    (path,) = former.glob("*.cut")
    path.write_bytes(path.read_bytes()[:-1])
    assert list(files_found(member)) == [f"quarantine/{path.name}"]


def test_a_receipt_that_cannot_be_read_is_named(member: Path) -> None:
    (path,) = (member / "discarded").glob("*-election.receipt.json")
    spoil(path, b"{", b"(")
    assert list(files_found(member)) == [f"discarded/{path.name}"]


def test_what_is_not_read_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("audit.log", "audit.log.1", "users.json.new", "ca.pem", "log/notes"):
        (folder / name).write_bytes(b"x")
    (folder / "lost-log-1").mkdir()
    assert shell.verify(folder, as_json=True) == shell.CheckExitCode.CLEAN
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])["summary"]
    assert summary["not_read"] == {
        "audit.log": "the server only writes it",
        "audit.log.1": "the server only writes it",
        "ca.pem": "dcpd does not know it; files that settings name are read when it starts",
        "log/notes": "dcpd does not know it; files that settings name are read when it starts",
        "lost-log-1/": "copies of a log that was given up: nothing reads them",
        "users.json.new": "it was being written when a server ended",
    }
    assert shell.verify(folder, as_json=False) == shell.CheckExitCode.CLEAN
    (line,) = capsys.readouterr().out.splitlines()
    assert "; not read: audit.log (the server only writes it), audit.log.1 (" in line


@pytest.mark.parametrize("name", [USERS_FILE, CLUSTER_FILE])
def test_what_a_server_refuses_is_found(
    member: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(member / name, b"{", b"[")
    if name == USERS_FILE:
        (member / CLUSTER_FILE).unlink()
    with pytest.raises(ServerStartError, match=name), DcpdProcess(member):
        pass
    assert shell.verify(member, as_json=False) == shell.CheckExitCode.FINDINGS
    assert f"file: {name}: " in capsys.readouterr().out


def test_users_of_long_ago_are_refused_until_a_person_takes_them(folder: Path) -> None:
    path = folder / USERS_FILE
    newest = folder / "users.json.newest"
    users = Users(path, iterations=1)
    older = path.read_bytes()
    users.add("bob", "battery-staple")
    path.write_bytes(older)
    assert "not the one that was written last" in files_found(folder)[USERS_FILE]
    started = subprocess.run(
        [sys.executable, "-m", "dcp.server.main", "--data", folder, "--port", "0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert started.returncode not in {0, None}
    assert "delete users.json.newest" in started.stderr
    newest.write_bytes(b"\xff")
    assert "users.json.newest: cannot be read" in files_found(folder)[USERS_FILE]
    newest.unlink()
    assert files_found(folder) == {}
    assert list(Users(path, iterations=1).names()) == ["ada"]


def test_a_running_server_takes_older_users_only_when_told(folder: Path) -> None:
    path = folder / USERS_FILE
    running = Users(path, iterations=1)
    older = path.read_bytes()
    running.add("bob", "battery-staple")
    replace_file(path, older)
    assert running.names() == ["ada", "bob"]
    assert "not the one that was written last" in running.problem
    (folder / "users.json.newest").unlink()
    assert running.names() == ["ada"]
    assert running.problem == ""


def test_a_crash_may_leave_the_users_of_before_or_of_after(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / USERS_FILE
    older = path.read_bytes()
    written: list[Path] = []

    def dies(after: int) -> None:
        def replace(path: Path, data: bytes) -> None:
            if len(written) == after:
                raise OSError("the process dies here")
            written.append(path)
            replace_file(path, data)

        monkeypatch.setattr(users_file, "replace_file", replace)

    for after in (1, 2):
        written.clear()
        path.write_bytes(older)
        (folder / "users.json.newest").unlink(missing_ok=True)
        dies(after)
        with pytest.raises(UsersFileError, match="cannot be written"):
            Users(path, iterations=1).add("bob", "battery-staple")
        assert (path.read_bytes() != older) == (after == 2)
        assert files_found(folder) == {}


def test_an_older_file_of_the_cluster_is_refused(member: Path) -> None:
    content = read_cluster_file(member)
    assert content is not None
    older = (member / CLUSTER_FILE).read_bytes()
    begun = begin_incarnation(member, content)
    (member / CLUSTER_FILE).write_bytes(older)
    text = files_found(member)[CLUSTER_FILE]
    assert f"it is of incarnation 0, and this folder has begun {begun.incarnation}" in text
    with pytest.raises(FolderError, match=r"delete cluster\.json\.newest"):
        read_cluster_file(member)
    (member / "cluster.json.newest").unlink()
    assert read_cluster_file(member) == content
