"""`dcpctl verify`: the files of a data folder beside log and store."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from clients.testing import ServerStartError
from dcp.server.access.users import USERS_FILE, Users
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
from dcp.server.files.kept_twice import read_kept, remove_kept, twin_of, write_kept
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
    """Write a wrong content, of which both copies are sound."""
    data = read_kept(path).content
    assert old in data
    data = data.replace(old, new, 1)
    if data.startswith(b"{"):
        write_kept(path, data)
    else:
        for each in (path, twin_of(path)):
            each.write_bytes(data)


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
    for hit in (path, twin_of(path)):
        for at in range(len(data)):
            hit.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            found = files_found(member)
            assert list(found) == [f"discarded/{hit.name}"], at
            assert "Its other copy is right" in found[f"discarded/{hit.name}"]
        hit.write_bytes(data)
    twin_of(path).unlink()
    copy = path.with_name(path.name.replace("epoch2", "epoch3"))
    path.rename(copy)
    text = files_found(member)[f"discarded/{copy.name}"]
    assert text.startswith(f"it is a copy of {path.name}, and its twin does not help")


def test_the_folder_of_the_version_before_is_read(member: Path) -> None:
    former = (member / "discarded").rename(member / FORMER_DISCARD_FOLDER)
    (path,) = former.glob("*.cut")
    twin_of(path).unlink()
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
        remove_kept(member / CLUSTER_FILE)
    with pytest.raises(ServerStartError, match=name), DcpdProcess(member):
        pass
    assert shell.verify(member, as_json=False) == shell.CheckExitCode.FINDINGS
    assert f"file: {name}: " in capsys.readouterr().out


def test_users_of_long_ago_count_only_without_their_twin(folder: Path) -> None:
    path = folder / USERS_FILE
    users = Users(path, iterations=1)
    older = path.read_bytes()
    users.add("bob", "battery-staple")
    path.write_bytes(older)
    assert "it is older than its other copy" in files_found(folder)[USERS_FILE]
    assert Users(path, iterations=1).names() == ["ada", "bob"]
    with DcpdProcess(folder) as server:
        assert server.stop() == 0
    assert files_found(folder) == {}
    assert path.read_bytes() == twin_of(path).read_bytes() != older
    path.write_bytes(older)
    twin_of(path).unlink()
    assert files_found(folder) == {}
    assert Users(path, iterations=1).names() == ["ada"]


def test_users_of_the_version_before_keep_their_guard(folder: Path) -> None:
    """A file without a seal is refused if users.json.newest says that it is not the newest."""
    path = folder / USERS_FILE
    newest = folder / "users.json.newest"
    text = read_kept(path).content
    remove_kept(path)
    path.write_bytes(text)
    newest.write_text(f"{sha256(text + b' ').hexdigest()}\n")
    assert "not the one that was written last" in files_found(folder)[USERS_FILE]
    with pytest.raises(ServerStartError, match=r"delete users\.json\.newest"), DcpdProcess(folder):
        pass
    assert path.read_bytes() == text
    newest.write_bytes(b"\xff")
    assert "users.json.newest: cannot be read" in files_found(folder)[USERS_FILE]
    newest.write_text(f"{sha256(text).hexdigest()}\n")
    with DcpdProcess(folder) as server:
        assert server.stop() == 0
    assert read_kept(path).is_sealed
    assert not newest.exists()
    assert files_found(folder) == {}


def test_a_running_server_takes_older_users_only_without_twin(folder: Path) -> None:
    path = folder / USERS_FILE
    running = Users(path, iterations=1)
    older = path.read_bytes()
    running.add("bob", "battery-staple")
    path.write_bytes(older)
    assert running.names() == ["ada", "bob"]
    twin_of(path).unlink()
    assert running.names() == ["ada"]
    assert running.problem == ""


def test_an_older_file_of_the_cluster_is_refused(member: Path) -> None:
    """One of the version before, which has no seal."""
    content = read_cluster_file(member)
    assert content is not None
    path = member / CLUSTER_FILE
    plain = read_kept(path).content
    begun = begin_incarnation(member, content)
    assert read_cluster_file(member) == begun
    remove_kept(path)
    path.write_bytes(plain)
    newest = member / "cluster.json.newest"
    newest.write_text(f"c1 {begun.incarnation}\n")
    text = files_found(member)[CLUSTER_FILE]
    assert f"it is of incarnation 0, and this folder has begun {begun.incarnation}" in text
    with pytest.raises(FolderError, match=r"delete cluster\.json\.newest"):
        read_cluster_file(member)
    newest.unlink()
    assert read_cluster_file(member) == content
    newest.write_text("c1 0\n")
    begin_incarnation(member, content)
    assert read_kept(path).is_sealed
    assert not newest.exists()
