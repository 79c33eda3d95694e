"""Places in the history, selections, and what a table of legs says; without any archive."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.backup.archives.archive_errors import BackupError, PointError
from clients.backup.archives.archive_manifest import RunRecord
from clients.backup.archives.chunk import Chunker, Piece, frames_of
from clients.backup.archives.legs import (
    Leg,
    Placed,
    cuts_of,
    intervals,
    newest_whole,
    position_of,
    whole_states,
)
from clients.backup.archives.point import Point, parse_seqnos, parse_time, time_text
from clients.backup.export import Export, ExportRow, json_line
from clients.backup.fold import _base_of, run_to_keep
from clients.backup.restore import Restore
from clients.backup.selection import Selection, parse_mapping
from clients.cli.backup_commands import size_text
from clients.cli.dcpctl import run as dcpctl
from dcp.wire.feature import Feature
from support.backup_pair import back_up, memory_archive
from support.memory_node import MemoryNode

SECOND = 10**9


def leg(number, low, high, ranges, versions=((1, 0),)):
    return Leg(number, low, high, high, high, versions, ranges)


CHAIN = [
    Placed(1, leg(0, 0, 100, ((0, 0), (100, 100)))),
    Placed(2, leg(0, 100, 120, ((100, 120),), ((2, 90), (1, 0)))),
    Placed(3, leg(0, 110, 130, ((110, 110), (130, 130)), ((3, 110), (2, 90), (1, 0)))),
]


def test_what_is_visible():
    assert intervals(CHAIN) == [(1, 0, 0, 100), (2, 0, 100, 110), (3, 0, 110, 130)]
    assert intervals(CHAIN, 105) == [(1, 0, 0, 100), (2, 0, 100, 105)]
    assert intervals(CHAIN[:2]) == [(1, 0, 0, 100), (2, 0, 100, 120)]
    assert whole_states(CHAIN) == ((0, 0), (100, 110), (130, 130))
    assert [newest_whole(whole_states(CHAIN), at) for at in (0, 99, 100, 105, 129, 500)] == [
        0, 0, 100, 105, 110, 130
    ]  # fmt: skip
    assert cuts_of(CHAIN[:1], CHAIN[1:]) == []
    assert cuts_of(CHAIN[:2], CHAIN[2:]) == [110]
    assert position_of(CHAIN).versions == ((3, 110), (2, 90), (1, 0))
    assert position_of(CHAIN, 1).versions == ((3, 110),)
    assert position_of([]).seqno == 0


def test_base_is_complete_at_its_end_and_where_run_stands_on_it():
    base = _base_of(CHAIN[:2], cuts_of(CHAIN[:2], CHAIN[2:]))
    assert whole_states([Placed(3, base)]) == ((0, 0), (110, 110), (120, 120))


def record(run, ended_s):
    return RunRecord(
        run, "id", "server", 0, ended_s * SECOND, True, False, 0, [], {}, {},
        {0: ("_default._default", 0)}, 0, 0, 0,
    )  # fmt: skip


RUNS = [record(2, 100), record(3, 200), record(4, 300)]


@pytest.mark.parametrize(
    ("point", "last"),
    [(Point(), 4), (Point(run=2), 2), (Point(time_ns=100 * SECOND), 2),
     (Point(time_ns=100 * SECOND + 1), 3), (Point(time_ns=0), 2), (Point(seqnos={1: 1}), 4)],
)  # fmt: skip
def test_the_run_that_a_point_stands_on(point, last):
    assert [item.run for item in point.runs_of(RUNS)] == list(range(2, last + 1))


@pytest.mark.parametrize(("base_ended_s", "begins_s"), [(100, 100), (0, 150)])
def test_times_that_were_folded_away_are_refused(base_ended_s, begins_s):
    """Of an archive that older programs folded, the base's run begins no earlier than it did."""
    base = record(3, 200)._replace(
        base_through=2, base_ended_ns=base_ended_s * SECOND, started_ns=150 * SECOND
    )
    runs = [base, record(4, 300)]
    for time_ns in (0, 50 * SECOND, begins_s * SECOND):
        with pytest.raises(PointError, match="folded into run 3") as info:
            Point(time_ns=time_ns).runs_of(runs)
        assert "--run 3" in info.value.hint
    assert Point(time_ns=begins_s * SECOND + 1).runs_of(runs) == runs[:1]
    assert Point(time_ns=201 * SECOND).runs_of(runs) == runs


@pytest.mark.parametrize(
    ("point", "runs", "text"),
    [(Point(), [], "no finished run"), (Point(run=1), RUNS, "no run 1; its runs are 2 to 4"),
     (Point(run=5), RUNS, "no run 5"), (Point(time_ns=301 * SECOND), RUNS, "not in the archive")],
)  # fmt: skip
def test_points_that_are_not_there(point, runs, text):
    with pytest.raises(PointError, match=text):
        point.runs_of(runs)


@given(st.integers(0, 4_000_000_000 * SECOND))
def test_times_are_read_exactly(time_ns):
    assert parse_time(f"{time_ns // SECOND}.{time_ns % SECOND:09}") == time_ns
    milliseconds_ns = time_ns // 1_000_000 * 1_000_000
    assert parse_time(time_text(time_ns)) == milliseconds_ns


def test_times_and_vectors_that_are_none():
    assert parse_time("1970-01-01T01:00:00+01:00") == 0
    assert parse_time("1970-01-02") == 86_400 * SECOND
    for text in ("", "yesterday", "-5", "1e9", "nan", "2026-13-01"):
        with pytest.raises(PointError):
            parse_time(text)
    assert parse_seqnos({"0": 5, "1023": 0}) == {0: 5, 1023: 0}
    for document in ([], {"1024": 1}, {"x": 1}, {"1": "2"}, {"1": -1}, {"1": True}, {"1": 2**64}):
        with pytest.raises(PointError):
            parse_seqnos(document)


def test_mappings():
    assert parse_mapping(["a.b=c.d", "e.f=g.h"]) == {"a.b": "c.d", "e.f": "g.h"}
    for item in ("", "a.b", "=a.b", "a.b=", "a.b=c", "a.b=c.d.e"):
        with pytest.raises(BackupError, match="not a mapping"):
            parse_mapping([item])


def test_what_is_pruned():
    assert run_to_keep(RUNS, 3, None) is None
    assert run_to_keep(RUNS, 9, None) is None
    assert run_to_keep(RUNS, 2, None) == 3
    assert run_to_keep(RUNS, None, 150 * SECOND) == 3
    assert run_to_keep(RUNS, None, 999 * SECOND) == 4, "the newest always stays"
    assert run_to_keep([], 1, None) is None


def frame(vb_id, seqno, size):
    body = bytes(size)
    head = (0x80, 0x57, 1, 31, 0, vb_id, 32 + size, 0, 1, seqno, 1, 0, 0, 0, 0, 0)
    import struct

    return struct.pack(">BBHBBHIIQQQIIIHB", *head) + b"\0" + body


@given(
    pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 300)),
                    max_size=40),
    chunk_bytes=st.integers(1, 2000), gathered_max=st.integers(1, 3000),
)  # fmt: skip
def test_chunks_hold_every_frame_once_and_in_order(pieces, chunk_bytes, gathered_max):
    chunker = Chunker(chunk_bytes, gathered_max)
    written = {vb_id: [] for vb_id in range(4)}
    chunks = []
    for vb_id, count, size in pieces:
        first = len(written[vb_id]) + 1
        frames = [frame(vb_id, first + at, size) for at in range(count)]
        written[vb_id] += frames
        last = first + count - 1
        piece = Piece(vb_id, 0, first, last, count, b"".join(frames), [leg(0, 0, last, ())])
        chunks += chunker.add(piece)
    chunks += chunker.finish(2)
    chunks += chunker.flush()
    found = {vb_id: [] for vb_id in range(4)}
    for chunk in chunks:
        # Were it killed after this chunk, the next run would go on where its legs end.
        saved = {section.vb_id: section.last_seqno for section in chunk.sections}
        assert {vb_id: legs[-1].to_seqno for vb_id, legs in chunk.legs.items()} == saved
        for section in chunk.sections:
            found[section.vb_id] += [
                chunk.data[start:stop] for _, start, stop in frames_of(chunk.data, section)
            ]
    assert found == written


def test_sizes_in_words():
    assert [size_text(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 TiB"
    ]  # fmt: skip


@pytest.fixture(scope="module")
def exported():
    node = MemoryNode(2)
    writer = node.connect()
    writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)
    for number in range(30):
        writer.set(number % 3, b"\0k%d" % number, b"\xff" * (number % 2) + b"%d" % number)
    writer.delete(0, b"\0k0")
    archive = memory_archive()
    back_up(node, archive, range(3))
    return archive


def test_parquet_and_json_lines_say_the_same(exported):
    from pyarrow import parquet

    lines, table = io.BytesIO(), io.BytesIO()
    report = Export(exported, Point(), Selection()).to_json_lines(lines)
    assert report.documents == 29
    assert Export(exported, Point(), Selection()).to_parquet(table) == report
    rows = [ExportRow(**row) for row in parquet.read_table(table).to_pylist()]
    assert b"".join(json_line(row) for row in rows) == lines.getvalue()
    documents = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert {document["v"] for document in documents} == {1}
    odd = next(document for document in documents if document["key"] == "k7")
    assert odd["value_encoding"] == "base64"
    work = Export(exported, Point(), Selection(prefix=b"k1"))
    assert {row.key[:2] for row in work.rows()} == {b"k1"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["backup", "run"], "--archive"),
        (["backup", "prune", "--archive", "a"], "use either --keep or"),
        (["backup", "prune", "--archive", "a", "--keep", "1", "--older-than", "1d"], "either"),
        (["backup", "prune", "--archive", "a", "--keep", "0"], "--keep"),
        (["backup", "restore", "--archive", "a", "--time", "1", "--run", "1"], "cannot be used"),
        (["backup", "export", "--archive", "a", "--to", "x.txt"], "--format is missing"),
        (["backup", "merge", "--archive", "a"], "--into"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(arguments, text, capfd):
    assert dcpctl(arguments) == 2
    assert text in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (["backup", "restore", "--archive", "a", "--seqnos", "{"], "not valid JSON", 2),
        (["backup", "restore", "--archive", "a", "--seqnos", "nofile"], "No such file", 2),
        (["backup", "restore", "--archive", "a", "--time", "soon"], "is not a time", 2),
        (["backup", "restore", "--archive", "a", "--map", "x"], "is not a mapping", 1),
        (["backup", "info", "--archive", "/nonexistent/a"], "there is no archive", 1),
    ],
)
def test_values_that_make_no_sense(arguments, text, code, capfd):
    assert dcpctl(arguments) == code
    assert text in capfd.readouterr().err


def test_an_age_that_is_none(tmp_path, capfd):
    from clients.backup.archives.archive import create_archive

    create_archive(str(tmp_path / "a"), 1)
    for age in ("", "5", "d", "-1d", "5y"):
        url = str(tmp_path / "a")
        assert dcpctl(["backup", "prune", "--archive", url, "--older-than", age]) == 1
        assert "is not an age" in capfd.readouterr().err


def test_seqnos_of_a_partition_without_changes_are_refused():
    """Only 0 is there: as of that seqno it is empty."""
    node, archive = MemoryNode(1), memory_archive()
    writer = node.connect()
    writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)
    writer.set(0, b"\0k", b"v")
    back_up(node, archive, (0, 1))
    assert len(list(Export(archive, Point(seqnos={0: 1, 900: 0}), Selection()).rows())) == 1
    for work in (Export, Restore):
        with pytest.raises(PointError, match="seqno 7 is not in the archive") as caught:
            work(archive, Point(seqnos={0: 1, 900: 7}), Selection())
        assert caught.value.vb_id == 900


def test_the_commands_refuse_seqnos_given_twice_or_are_not_there(tmp_path, capsys):
    archive = ("--archive", str(tmp_path / "none"))
    for seqnos, words in (
        ('{"5": 1, "5": 2}', "named twice"),
        ('{"5": 1, "05": 2}', "named twice"),
    ):
        assert dcpctl(["backup", "restore", *archive, "--dry-run", "--seqnos", seqnos]) == 2
        assert words in capsys.readouterr().err
