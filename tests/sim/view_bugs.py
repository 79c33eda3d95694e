"""Faults of cuts, scans, hashes and batches that can be put in on purpose.

Plans with probers, and with consumers that ask for cuts, reach them (`sim.plan.probed`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

from google_crc32c import value as crc32c

from clients.consumer.batch_reader import CutMeeting
from dcp.session.kv import batches as batch_commands
from dcp.session.kv.hash_reads import HashReads
from dcp.session.kv.scans import ScanCommands
from dcp.session.state import SessionState
from dcp.stream import pending_cut
from dcp.stream.active_stream import ActiveStream
from dcp.stream.pending_cut import PendingCut
from dcp.wire.frame import Frame
from failover.replication.cuts import cut_leader, cut_member
from failover.replication.cuts.cut_member import CutMember
from failover.rules.cut import Ask
from sim import prober, twin_mender
from sim.planting import ClusterBug, Replaced, all_replaced
from vbucket.check.mend import FROM_COPY
from vbucket.engine import cut as cut_module
from vbucket.engine import hashes
from vbucket.engine.cut import Cut
from vbucket.engine.documents import batch as batch_module
from vbucket.engine.documents.batch import BatchChange, apply_batch
from vbucket.engine.engine import Engine, Outcome
from vbucket.engine.read_view import ReadView
from vbucket.log import recovery
from vbucket.log.recovery import RecoveredGroup, Recovery
from vbucket.native.key_hashes import KeyHashes, Row, RowForm
from vbucket.store.block import Block
from vbucket.store.lmdb.page_mend import PageMender
from vbucket.store.records import BY_SEQNO_TABLE

# -- cuts ------------------------------------------------------------------------------------------

_draw_cut = cut_module.draw_cut


def _cut_of_committed(engine: Engine, now_ns: int) -> Cut:
    """A cut notes what is committed of each partition, and not what has a CAS by then."""
    cut = _draw_cut(engine, now_ns)
    return cut._replace(seqnos=[part.committed_seqno for part in engine.partitions])


def _cut_above_all(engine: Engine, now_ns: int) -> Cut:
    """A cut notes no end for the partition that has the most."""
    cut = _draw_cut(engine, now_ns)
    longest = max(cut.seqnos)
    return cut._replace(seqnos=[seqno + 3 * (seqno == longest) for seqno in cut.seqnos])


_reached_by = PendingCut.reached_by


def _never_waits(cut: PendingCut, stream: ActiveStream) -> bool:
    """A stream that has reached a cut goes on."""
    _reached_by(cut, stream)
    return False


def _told_early(cut: PendingCut, drawn: Cut, streams: Any) -> None:
    """A cut waits for one stream only."""
    _pending_init(cut, drawn, streams)
    cut.behind = set(sorted(cut.behind)[:1])


_pending_init = PendingCut.__init__

# -- cuts of clusters ------------------------------------------------------------------------------

_draw = CutMember.draw


def _draw_and_go_on(member: CutMember, ask: Ask, clock_ns: int) -> str:
    """A member that has drawn a cut goes on committing."""
    why = _draw(member, ask, clock_ns)
    if not why:
        member._watermarks.held = None
    return why


def _any_meeting(meeting: CutMeeting[Any], following: Collection[Any], followed: set[int]) -> bool:
    """A consumer holds a cut when each connection waits at some cut."""
    is_cut = len(meeting._at) == len(following) > 0
    if is_cut:
        meeting.release()
    return is_cut


def _median_closed(members: Iterable[tuple[int, int]], _clock_ns: int) -> int:
    """The next time is above what half of the members have closed."""
    found = sorted(first for _, first in members)
    return found[(len(found) - 1) // 2]


def _not_at_all(*_args: object) -> None:
    """Leave something out."""


# -- scans -----------------------------------------------------------------------------------------

_resolve = ReadView._resolve


def _resolve_newest(view: ReadView, key: bytes, *, with_value: bool) -> Any:
    """A view moves on with its partition."""
    view.seqno = max(view.seqno, view._part.high_seqno)
    return _resolve(view, key, with_value=with_value)


_create = ScanCommands.create


def _create_at_once(commands: ScanCommands, request: Frame) -> None:
    """The answer to a scan's request does not wait until what it shows is committed."""
    with all_replaced((Replaced(SessionState, "observes", lambda *_: None),)):
        _create(commands, request)


# -- hashes ----------------------------------------------------------------------------------------


def _change_without_removed(
    table: KeyHashes, _removed: list[Row], added: list[Row], form: RowForm
) -> None:
    """What a document was before stays in the sum."""
    table.documents += table._add(added, form, 1)


_rows_of = hashes._Work.rows_of


def _rows_of_all_but_last(work: Any, keys: list[bytes]) -> list[Row]:
    """The last key in memory is left out."""
    return _rows_of(work, keys)[:-1]


def _answer_at_once(reads: HashReads, request: Frame, extras: bytes, value: bytes) -> None:
    """An answer does not wait until what it tells is committed."""
    reads._state.answer(request, extras=extras, value=value)


# -- batches ---------------------------------------------------------------------------------------


def _apply_one_by_one(engine: Engine, changes: Sequence[BatchChange]) -> list[Outcome]:
    """Each change of a batch is checked when those before it are made."""
    made: list[Outcome] = []
    for index, change in enumerate(changes):
        try:
            made += apply_batch(engine, [change])
        except batch_module.BatchRefusedError as error:
            raise batch_module.BatchRefusedError(index, error.status) from error
    return made


def _apply_without_last(engine: Engine, changes: Sequence[BatchChange]) -> list[Outcome]:
    """The last change of a large batch is answered, and not made."""
    if len(changes) < 3:
        return apply_batch(engine, changes)
    made = apply_batch(engine, changes[:-1])
    last = engine.partitions[changes[-1].vb_id]
    return [*made, (0, made[0][1], last.high_seqno)]


# -- disks and copies ------------------------------------------------------------------------------


def _present_only(recovery: Recovery) -> Iterator[RecoveredGroup]:
    """A start reads the segments that are there, as if none was missing."""
    segments = [
        number for number in recovery._device.segments() if number > recovery._after_segment
    ]
    for segment in segments:
        data = recovery._device.read(segment)
        recovery._is_known = False
        yield from recovery._groups_of(segment, data, is_newest=segment == segments[-1])
    recovery._check_end()
    recovery._is_scanned = True


def _nothing_lost(*_args: object) -> None:
    """A log that ends too early is complete."""


def _takes_all(*_args: object, **_named: object) -> str:
    """A copy takes what another one has, whatever the history and what is committed."""
    return ""


def _put_older(mender: PageMender, key: bytes, _entries: Sequence[bytes]) -> str:
    """What cannot be read becomes what is before it in the block."""
    place = mender.place_of_value(BY_SEQNO_TABLE, key)
    assert place is not None
    value = mender.bytes_at(BY_SEQNO_TABLE, key, place)
    block, pieces = Block(key, value), [b""]
    body = bytes(block.body)
    for (start, end), crc in zip(pairwise((0, *block.ends)), block.frame_crcs, strict=True):
        frame = body[start:end]
        older = pieces[-1][: end - start].ljust(end - start, b"\0")
        pieces.append(frame if crc32c(frame) == crc else older)
    mender.put_value(BY_SEQNO_TABLE, key, place, value[: len(value) - len(body)] + b"".join(pieces))
    return FROM_COPY


VIEW_BUGS: Final[dict[str, ClusterBug]] = {
    "cut-of-committed": ClusterBug(
        "a cut leaves out what has a CAS, and is not committed yet",
        (Replaced(pending_cut, "draw_cut", _cut_of_committed),), nodes=1,
    ),
    "cut-beyond": ClusterBug(
        "a cut has changes of one partition that came later",
        (Replaced(pending_cut, "draw_cut", _cut_above_all),), nodes=1,
    ),
    "cut-passed": ClusterBug(
        "streams pass a cut before it is told", (Replaced(PendingCut, "reached_by", _never_waits),),
        nodes=1,
    ),
    "cut-told-early": ClusterBug(
        "a cut is told when the first stream has reached it",
        (Replaced(PendingCut, "__init__", _told_early),), nodes=1,
    ),
    "cut-commits-on": ClusterBug(
        "a node that has drawn a cut of the cluster commits before all have",
        (Replaced(CutMember, "draw", _draw_and_go_on),),
    ),
    "cut-meets-anywhere": ClusterBug(
        "a consumer takes cuts of several times for one",
        (Replaced(CutMeeting, "is_cut", _any_meeting),),
    ),
    "cut-closes-nothing": ClusterBug(
        "a node that has drawn a cut gives changes a CAS below its time",
        (Replaced(cut_member, "close_time", _not_at_all),),
    ),
    "cut-held-for-ever": ClusterBug(
        "a node waits for ever for a leader's word that a cut is complete",
        (Replaced(CutMember, "tick", _not_at_all),),
    ),
    "cut-waits-for-clock": ClusterBug(
        "a node that has closed times ahead of its clock takes part again when the clock is there",
        (Replaced(cut_leader, "first_open_of_all", _median_closed),),
    ),
    "scan-moves-on": ClusterBug(
        "a scan shows what is written while it runs",
        (Replaced(ReadView, "_resolve", _resolve_newest),),
    ),
    "scan-uncommitted": ClusterBug(
        "a scan shows what is not committed",
        (Replaced(ScanCommands, "create", _create_at_once),),
    ),
    "hashes-keep-old": ClusterBug(
        "hashes keep what a document was before",
        (Replaced(KeyHashes, "change", _change_without_removed),), nodes=1,
    ),
    "hashes-miss-one": ClusterBug(
        "hashes leave out a document that is in memory",
        (Replaced(hashes._Work, "rows_of", _rows_of_all_but_last),), nodes=1,
    ),
    "batch-one-by-one": ClusterBug(
        "a batch that is refused was made in part",
        (Replaced(batch_commands, "apply_batch", _apply_one_by_one),), nodes=1,
    ),
    "batch-lacks-last": ClusterBug(
        "the last change of a batch is not made",
        (Replaced(batch_commands, "apply_batch", _apply_without_last),), nodes=1,
    ),
    "gap-is-read-over": ClusterBug(
        "a start does not miss segments of the log that its store lacks",
        (Replaced(Recovery, "groups", _present_only),), nodes=1,
    ),
    "early-end-is-good": ClusterBug(
        "a start does not look whether the log ends too early",
        (Replaced(recovery, "lost_end", _nothing_lost),), nodes=1,
    ),
    "repair-takes-all": ClusterBug(
        "a copy takes versions of another history",
        (Replaced(prober, "why_not_taken", _takes_all),),
    ),
    "repair-takes-older": ClusterBug(
        "a copy puts an older version in place of the one that it lacks, and proves nothing",
        (Replaced(twin_mender, "put_versions", _put_older),),
    ),
    "hashes-at-once": ClusterBug(
        "hashes are told before the changes are committed",
        (Replaced(HashReads, "_answer", _answer_at_once),),
    ),
}  # fmt: skip
"""Name -> the bug."""
