"""Small files of a data folder: one wrong copy is put right, and no older one replaces a newer."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import cast

import pytest

from dcp.server.access.users import USERS_FILE, Users
from dcp.server.cluster.cluster_file import (
    NEWEST_FILE,
    SECRET_BYTES,
    ClusterFile,
    read_cluster_file,
    write_cluster_file,
)
from dcp.server.cluster.joining.founding import FOUNDING_FILE
from dcp.server.cluster.node_map import MAP_FILE
from dcp.server.cluster.receipt_files import (
    DISCARD_FOLDER,
    FORMER_DISCARD_FOLDER,
    keep_cut_off,
    keep_election,
    receipts_in,
)
from dcp.server.cluster.seen_file import SEEN_FILE
from dcp.server.files.kept_twice import (
    KEPT_FOLDERS,
    KEPT_NAMES,
    FileDamagedError,
    choose,
    is_kept,
    mend_folder,
    mend_kept,
    put_kept,
    read_copy,
    read_kept,
    remove_kept,
    twin_of,
    write_kept,
    wrong_copies,
)
from dcp.server.operate.backup_reports import BACKUPS_FILE
from dcp.server.storage.closed_times import CLOSED_FILE
from dcp.server.storage.folder import CLUSTER_FILE, MARKER_NAME, open_folder
from dcp.server.storage.process.scrubbing import SCRUB_FILE
from support.forgetful_disk import ForgetfulDisk, Power
from support.power_node import SHARES
from support.server import DcpdProcess, command
from support.stored_bytes import pack_mutation
from tests.server.test_scrub_live import scrubbed
from vbucket.log.device_files import FolderDisk
from vbucket.model.receipt import CutOff, ElectionLoss

NAME = "map.json"
TWIN = NAME + ".twin"
OLD, NEW = b'{"format":1,"rev":1}', b'{"format":1,"rev":2}'


class CutError(Exception):
    """The power is cut."""


def damages_of(data: bytes) -> list[bytes | None]:
    """Return what may become of a copy: a bit, zeros, a cut, nothing."""
    flipped = [
        data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        for bit in range(0, 8 * len(data), 11)
    ]
    cut = [data[:size] for size in range(0, len(data), 9)]
    return [*flipped, *cut, bytes(len(data)), None]


def put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("content", [OLD, b"{}", b'{\n "a": {}\n}\n'])
@pytest.mark.parametrize("damages_twin", [False, True])
def test_whatever_becomes_of_one_copy_is_mended(
    tmp_path: Path, content: bytes, damages_twin: bool
) -> None:
    path = tmp_path / NAME
    write_kept(path, b'{"before":true}')
    write_kept(path, content)
    data = path.read_bytes()
    assert json.loads(data).pop("seal")
    assert twin_of(path).read_bytes() == data
    assert mend_folder(tmp_path) == []
    hit = twin_of(path) if damages_twin else path
    for damaged in damages_of(data):
        put(hit, damaged)
        assert read_kept(path) == (content, True), damaged
        named = wrong_copies(path)
        assert [file for file, _ in named] == [hit.name] * (not damages_twin or damaged is not None)
        (wrong,) = mend_folder(tmp_path)
        assert (wrong.kind, wrong.file) == ("file", hit.name)
        assert wrong.mended
        assert path.read_bytes() == twin_of(path).read_bytes() == data


def test_two_damaged_copies_are_named_and_nothing_is_invented(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_kept(path, OLD)
    for each in (path, twin_of(path)):
        each.write_bytes(each.read_bytes().replace(b":1", b":3", 1))
    with pytest.raises(FileDamagedError, match="its twin does not help: its checksum is wrong"):
        read_kept(path)
    before = path.read_bytes(), twin_of(path).read_bytes()
    (wrong,) = mend_folder(tmp_path)
    assert not wrong.mended
    assert (path.read_bytes(), twin_of(path).read_bytes()) == before
    write_kept(path, NEW)
    assert read_kept(path).content == NEW
    assert mend_folder(tmp_path) == []


def in_memory(disk: ForgetfulDisk) -> FolderDisk:
    return cast("FolderDisk", disk)


def content_in(disk: ForgetfulDisk) -> bytes | None:
    copies = [read_copy(NAME, disk.read(n) if n in disk.names() else None) for n in (NAME, TWIN)]
    chosen = choose(*copies)
    return None if chosen is None else chosen.copy.content


def test_a_power_cut_at_any_point_leaves_the_old_or_the_new() -> None:
    """And whatever then becomes of one copy, the old one does not come back once the new one was
    durable.
    """
    draw = random.Random(5)
    points = 0
    while True:
        points += 1
        power = Power()
        disk = ForgetfulDisk(power)
        put_kept(in_memory(disk), NAME, OLD)
        began = power.points

        def cut(_: str, power: Power = power, stop: int = began + points) -> None:
            if power.points == stop:
                raise CutError

        power.on_point = cut
        is_done = False
        try:
            put_kept(in_memory(disk), NAME, NEW)
            is_done = True
        except CutError:
            pass
        power.on_point = lambda _: None
        for share in SHARES:
            after = disk.after(Power(), draw, share)
            assert content_in(after) in ({NEW} if is_done else {OLD, NEW})
            copies = {after.read(n) for n in (NAME, TWIN) if n in after.names()}
            assert len(copies) == 1, "an older copy stands beside a newer one"
            mend_kept(in_memory(after), NAME)
            after = after.after(Power(), draw, 0)
            assert after.read(NAME) == after.read(TWIN) == copies.pop()
        if is_done:
            break
    assert points > 8


def test_a_power_cut_while_a_copy_is_mended_loses_nothing() -> None:
    draw = random.Random(6)
    for hit in (NAME, TWIN):
        for point in range(1, 8):
            power = Power()
            disk = ForgetfulDisk(power)
            put_kept(in_memory(disk), NAME, NEW)
            disk.rot(hit, draw)
            began = power.points

            def cut(_: str, power: Power = power, stop: int = began + point) -> None:
                if power.points == stop:
                    raise CutError

            power.on_point = cut
            with contextlib.suppress(CutError):
                mend_kept(in_memory(disk), NAME)
            for share in SHARES:
                assert content_in(disk.after(Power(), draw, share)) == NEW


@pytest.mark.parametrize("hit", [NAME, TWIN])
def test_a_power_cut_while_a_damaged_file_is_replaced(hit: str) -> None:
    draw = random.Random(7)
    for point in range(1, 16):
        power = Power()
        disk = ForgetfulDisk(power)
        put_kept(in_memory(disk), NAME, OLD)
        disk.rot(hit, draw)

        def cut(_: str, power: Power = power, stop: int = power.points + point) -> None:
            if power.points == stop:
                raise CutError

        power.on_point = cut
        with contextlib.suppress(CutError):
            put_kept(in_memory(disk), NAME, NEW)
        for share in SHARES:
            assert content_in(disk.after(Power(), draw, share)) in {OLD, NEW}


def test_a_full_disk_changes_nothing() -> None:
    power = Power()
    disk = ForgetfulDisk(power)
    put_kept(in_memory(disk), NAME, OLD)
    disk.is_full = True
    with pytest.raises(OSError, match="full"):
        put_kept(in_memory(disk), NAME, NEW)
    assert sorted(disk.names()) == [NAME, TWIN]
    assert content_in(disk) == OLD
    disk.is_full = False
    disk.syncs_to_fail = 1
    with pytest.raises(OSError, match="sync"):
        put_kept(in_memory(disk), NAME, NEW)
    assert content_in(disk) == OLD


def test_an_older_copy_that_is_put_back_has_no_effect(tmp_path: Path) -> None:
    path = tmp_path / NAME
    write_kept(path, OLD)
    older = path.read_bytes()
    write_kept(path, NEW)
    for each in (path, twin_of(path)):
        each.write_bytes(older)
        assert read_kept(path).content == NEW
        (wrong,) = mend_folder(tmp_path, is_start=True)
        assert "older" in wrong.what
        assert path.read_bytes() == twin_of(path).read_bytes() != older


def test_files_of_before_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_bytes(OLD)
    assert read_kept(path) == (OLD, False)
    assert mend_folder(tmp_path, is_start=True) == []
    assert read_kept(path) == (OLD, True)
    assert path.read_bytes() == twin_of(path).read_bytes()
    path.write_bytes(NEW)  # an earlier version ran in between
    assert read_kept(path) == (NEW, False)
    assert mend_folder(tmp_path, is_start=True) == []
    twin_of(path).unlink()
    assert read_kept(path) == (NEW, True)
    (tmp_path / FOUNDING_FILE).write_bytes(b"")
    assert mend_folder(tmp_path, is_start=True) == []
    assert is_kept(tmp_path / FOUNDING_FILE)


def test_an_old_identity_is_taken_only_with_its_newest_file(tmp_path: Path) -> None:
    member = ClusterFile(cluster="c", meta="m", secret="s" * SECRET_BYTES, name="a", incarnation=7)
    write_cluster_file(tmp_path, member)
    path = tmp_path / CLUSTER_FILE
    plain = read_kept(path).content.replace(b"7", b"6")
    path.write_bytes(plain)
    assert read_cluster_file(tmp_path) == member
    (wrong,) = mend_folder(tmp_path, is_start=True)
    assert wrong.mended
    path.write_bytes(plain)
    (tmp_path / NEWEST_FILE).write_text("c 6\n")  # an earlier version has begun it
    found = read_cluster_file(tmp_path)
    assert found is not None
    assert found.incarnation == 6


def test_each_small_file_of_a_folder_is_in_the_table() -> None:
    names = {
        BACKUPS_FILE, CLOSED_FILE, CLUSTER_FILE, FOUNDING_FILE, MAP_FILE, SCRUB_FILE, SEEN_FILE,
        USERS_FILE,
    }  # fmt: skip
    assert set(KEPT_NAMES) == names
    assert KEPT_FOLDERS == (DISCARD_FOLDER, FORMER_DISCARD_FOLDER)


def test_receipts_are_kept_twice(tmp_path: Path) -> None:
    entry = pack_mutation(vb_id=3, key=b"\0k", value=b"v", seqno=7, cas=1, rev_seqno=1)
    paths = [
        keep_cut_off(tmp_path, CutOff(3, 2, ((5, 0),), (entry,))),
        keep_election(tmp_path, ElectionLoss(4, 3, ((6, 0),), 9, 8), 12.5),
    ]
    told = receipts_in(tmp_path, "a").receipts
    for path in paths:
        for each in (path, twin_of(path)):
            data = each.read_bytes()
            for damaged in (bytes(len(data)), data[:-1], None):
                put(each, damaged)
                assert [wrong.file for wrong in mend_folder(tmp_path) if not wrong.mended] == []
                assert each.read_bytes() == data
    assert [row.file for row in receipts_in(tmp_path, "a").receipts] == [row.file for row in told]


def test_a_removed_file_is_gone_with_its_twin(tmp_path: Path) -> None:
    path = tmp_path / FOUNDING_FILE
    write_kept(path, b"{}")
    remove_kept(path)
    assert not is_kept(path)
    with pytest.raises(FileNotFoundError):
        read_kept(path)


def test_the_marker_is_put_right(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    open_folder(folder).close()
    marker = folder / MARKER_NAME
    whole = marker.read_bytes(), twin_of(marker).read_bytes()
    for path in (marker, twin_of(marker)):
        for damaged in damages_of(path.read_bytes()):
            put(path, damaged)
            opened = open_folder(folder)
            opened.close()
            assert (marker.read_bytes(), twin_of(marker).read_bytes()) == whole
            assert list(opened.mended) == [path.name] * (path == marker or damaged is not None)


def audited(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "audit.log").read_text().splitlines()]
    return [line["file"] for line in lines if line["event"] == "repair"]


def spoil(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [USERS_FILE, SCRUB_FILE, MARKER_NAME])
def test_a_server_mends_its_files_at_a_start(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder, "--partitions", "64") as server:
        scrubbed(server, 1)
        assert server.stop() == 0
    Users(folder / USERS_FILE, iterations=1).add("ada", "correct-horse")
    for hit in (folder / name, twin_of(folder / name)):
        before = hit.read_bytes()
        spoil(hit)
        with DcpdProcess(folder, "--partitions", "64") as server:
            assert "ada" in command(server, "user", "list").stdout
            assert server.stop() == 0
        assert audited(folder)[-1] == hit.name
        if name != SCRUB_FILE:
            assert hit.read_bytes() == before


def test_the_scrubber_mends_files_while_the_server_runs(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder, "--partitions", "64") as server:
        Users(folder / USERS_FILE, iterations=1).add("ada", "correct-horse")
        before = (folder / USERS_FILE).read_bytes()
        spoil(folder / USERS_FILE)
        report = scrubbed(server, 1)
        assert (report["damages"], report["mended"]) == ([], 1)
        assert (folder / USERS_FILE).read_bytes() == before
        twin_of(folder / USERS_FILE).unlink()
        assert scrubbed(server, 2)["mended"] == 2
        assert audited(folder) == [USERS_FILE, USERS_FILE + ".twin"]
        for path in (folder / USERS_FILE, twin_of(folder / USERS_FILE)):
            spoil(path)
        (row,) = scrubbed(server, 3)["damages"]
        assert (row["kind"], row["file"]) == ("file", USERS_FILE)
        assert "ada" in command(server, "user", "list").stdout, "it has them in memory"
