"""A file is damaged while no server runs: the next start mends what checksums prove."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clients.testing import ServerStartError
from support.server import DcpdProcess, command, printed
from support.stored_bytes import PAGE_BYTES, layout_of, overwrite
from tests.server.test_kept_twice import audited
from tests.server.test_scrub_live import flip, scrubbed, write, wrong_answers
from vbucket.log.record import RECORD_BYTES, scan_segment
from vbucket.log.segment_files import read_segment, segment_path, segments_in

ARGUMENTS = ("--item-cache-bytes", "0", "--partitions", "64")
DATA = Path("store") / "data.mdb"


def merged_and_logged(folder: Path, *arguments: str, is_killed: bool) -> None:
    with DcpdProcess(folder, *arguments) as server:
        write(server)
        assert command(server, "compact").returncode == 0
        write(server)
        scrubbed(server, 1)
        if is_killed:
            server.kill()
        else:
            assert server.stop() == 0


def group_at(folder: Path) -> tuple[Path, int, int]:
    """Return the segment with the longest log, and where a small group of it begins and ends."""
    log = folder / "log"
    number = max(segments_in(log), key=lambda each: segment_path(log, each).stat().st_size)
    start, found = 0, (0, 0)
    for group in scan_segment(read_segment(log, number), number, is_newest=True):
        if start and group.end - start < 4_000 and not found[0]:
            found = start, group.end
        start = group.end
    assert found[0], "no small group"
    return segment_path(log, number), *found


def flip_entry(folder: Path) -> None:
    path, start, end = group_at(folder)
    flip(path, (start + RECORD_BYTES + end) // 2)


def zero_head(folder: Path) -> None:
    path, start, _ = group_at(folder)
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(RECORD_BYTES))


def flip_header(folder: Path) -> None:
    flip(group_at(folder)[0], 9)


@pytest.mark.parametrize("damage", [flip_entry, zero_head, flip_header])
@pytest.mark.parametrize("is_killed", [False, True])
def test_what_the_log_itself_proves_is_put_back(
    tmp_path: Path, damage: Callable[[Path], None], is_killed: bool
) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder, *ARGUMENTS) as server:
        for number in range(20):  # one group for each
            printed(server, "set", f"small {number}", f"value {number}")
        if is_killed:
            server.kill()
        else:
            assert server.stop() == 0
    damage(folder)
    accepting = ("--accept-log-loss",) if is_killed else ()
    with DcpdProcess(folder, *ARGUMENTS, *accepting) as server:
        for number in range(20):
            assert printed(server, "get", f"small {number}").strip() == f"value {number}"
        assert command(server, "compact").returncode == 0
        assert server.stop() == 0
    assert [file for file in audited(folder) if file.startswith("log/")]
    assert not list(folder.glob("lost-log-*")), "nothing was given up"
    assert command(server, "verify", str(folder)).returncode == 0


def test_log_of_an_earlier_process_is_written_again(tmp_path: Path) -> None:
    """A start keeps what it has read: a segment that is damaged later is mended, whatever it is."""
    folder = tmp_path / "data"
    merged_and_logged(folder, *ARGUMENTS, is_killed=True)
    with DcpdProcess(folder, *ARGUMENTS) as server:
        path = max((folder / "log").glob("*.log"), key=lambda each: each.stat().st_size)
        before = path.read_bytes()
        path.write_bytes(before[:5000] + bytes(20_000) + before[25_000:])
        report = scrubbed(server, 2)
        assert report["damages"] == []
        assert path.read_bytes() == before
        path.write_bytes(bytes(len(before)))
        assert command(server, "compact").returncode == 0, "a merge mends it, too"
        assert wrong_answers(server) == {}
        assert server.stop() == 0
    assert audited(folder)[-1] == f"log/{path.name}"


@pytest.mark.parametrize("table", ["state", "failover", "meta", "by_key", "by_seqno"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_one_flipped_bit_of_any_table_does_not_end_a_start(
    tmp_path: Path, table: str, is_killed: bool
) -> None:
    folder = tmp_path / "data"
    merged_and_logged(folder, *ARGUMENTS, is_killed=is_killed)
    pages = layout_of(folder / "store")[table]
    for page in [*pages.leaves, *pages.branches]:
        flip(folder / DATA, page * PAGE_BYTES + 1_500)
    with DcpdProcess(folder, *ARGUMENTS) as server:
        assert scrubbed(server, 2)["damages"] == []
        assert wrong_answers(server) == {}
        assert server.stop() == 0
    assert str(DATA) in audited(folder)


def test_records_of_keys_that_a_start_reads_are_rebuilt(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    merged_and_logged(folder, *ARGUMENTS, is_killed=True)
    for page in layout_of(folder / "store")["by_key"].leaves:
        overwrite(folder / "store", page, "zeros")
    with DcpdProcess(folder, *ARGUMENTS) as server:
        assert scrubbed(server, 2)["damages"] == []
        assert wrong_answers(server) == {}
        assert server.stop() == 0


def test_a_branch_of_records_is_found_again_at_a_start(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with DcpdProcess(folder) as server:
        write(server)
        assert command(server, "compact").returncode == 0
        assert server.stop() == 0
    tables = layout_of(folder / "store")
    (branch,) = tables["state"].branches
    overwrite(folder / "store", branch, "zeros")
    with DcpdProcess(folder) as server:
        assert json.loads(command(server, "scrub", "status", "-o", "json").stdout)["mended"] == 1
        assert server.stop() == 0


@pytest.mark.parametrize("table", ["state", "failover", "meta"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_leaves_of_records_are_made_of_their_copy(
    tmp_path: Path, table: str, is_killed: bool
) -> None:
    folder = tmp_path / "data"
    merged_and_logged(folder, *ARGUMENTS, is_killed=is_killed)
    for page in layout_of(folder / "store")[table].leaves:
        overwrite(folder / "store", page, "zeros")
    with DcpdProcess(folder, *ARGUMENTS) as server:
        assert scrubbed(server, 2)["damages"] == []
        assert wrong_answers(server) == {}
        assert server.stop() == 0
    assert command(server, "verify", str(folder)).returncode == 0


@pytest.mark.parametrize("what", ["missing", "flipped", "older"])
def test_what_nothing_proves_is_named_and_left_alone(tmp_path: Path, what: str) -> None:
    """A copy of the records that is damaged, or of another state, does not count."""
    folder = tmp_path / "data"
    copy = folder / "store" / "rows.copy"
    merged_and_logged(folder, *ARGUMENTS, is_killed=False)
    older = copy.read_bytes()
    merged_and_logged(folder, *ARGUMENTS, is_killed=False)
    assert copy.read_bytes() != older
    if what == "flipped":
        flip(copy, 1_000)
    elif what == "missing":
        copy.unlink()
    else:
        copy.write_bytes(older)
    overwrite(folder / "store", min(layout_of(folder / "store")["state"].leaves), "zeros")
    before = (folder / DATA).read_bytes()
    with pytest.raises(ServerStartError, match="table state"), DcpdProcess(folder, *ARGUMENTS):
        pass
    assert (folder / DATA).read_bytes() == before
