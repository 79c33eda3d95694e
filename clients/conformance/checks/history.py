"""Checks of rollback: by itself, after a branch of history, after a purge of deletions."""

from __future__ import annotations

import json

from clients.conformance import packet as p
from clients.conformance import pages
from clients.conformance.check import (
    COLLECTIONS,
    NotApplicableError,
    Run,
    Written,
    check,
    ended,
    need,
    need_status,
)
from clients.conformance.checks.requests import written
from clients.conformance.packet import Packet
from clients.conformance.snapshots import CHANGES, fault_of, seqno_of
from clients.conformance.wire import ClosedError, failover_log

_UNKNOWN = 0x0BAD_0BAD_0BAD
_PAGE = pages.ROLLBACK


def _rolled_back(answer: Packet, to: int) -> None:
    """Fail unless a stream request is answered ROLLBACK to this seqno."""
    need_status(answer, p.ROLLBACK)
    need(len(answer.value) >= 8, f"the answer has {len(answer.value)} bytes")
    seqno = int.from_bytes(answer.value[:8], "big")
    need(seqno == to, f"it says roll back to {seqno}, not {to}")


@check(
    "rollback.nothing",
    "**Rollback is not necessary** as 0 is the smallest sequence number we have",
    _PAGE,
)
def nothing(run: Run) -> None:
    """Start 0 with uuid 0 is OK."""
    run.opened(run.dcp())


@check(
    "rollback.unknown-uuid",
    "Producer and consumer have no common histories. Hence **full rollback to 0**.",
    _PAGE,
)
def unknown_uuid(run: Run) -> None:
    """A uuid that is not in the failover log is ROLLBACK to 0."""
    last = written(run)[-1]
    _rolled_back(run.dcp().stream(run.vb, last.seqno, uuid=_UNKNOWN).answer, 0)


@check(
    "rollback.layout",
    'The "rollback" response contains the sequence number to roll back to.',
    pages.STREAM_REQ,
)
def layout(run: Run) -> None:
    """The answer has 8 bytes of value, neither extras nor key."""
    last = written(run)[-1]
    answer = need_status(run.dcp().stream(run.vb, last.seqno, uuid=_UNKNOWN).answer, p.ROLLBACK)
    answer.unpack("Q", "value")
    need(not answer.extras and not answer.key, f"it has extras or a key: {answer}")


@check(
    "rollback.again",
    "The consumer has to rollback till that point and resend the stream request",
    _PAGE,
)
def again(run: Run) -> None:
    """After a ROLLBACK, another request for the partition on the connection is OK."""
    last = written(run)[-1]
    wire = run.dcp()
    need_status(wire.stream(run.vb, last.seqno, uuid=_UNKNOWN).answer, p.ROLLBACK)
    run.opened(wire)


@check(
    "rollback.none", "Consumer **need not rollback** here as it has same history as producer", _PAGE
)
def none(run: Run) -> None:
    """The newest uuid, with a complete snapshot at a seqno that is there, is OK."""
    tokens = written(run)
    for token in tokens:
        need_status(run.dcp().stream(run.vb, token.seqno, uuid=token.uuid).answer)


@check(
    "rollback.snapshot-beyond",
    "Hence the consumer will have to **partial rollback to SnapStartSeqno** and post"
    " another stream request.",
    _PAGE,
)
def snapshot_beyond(run: Run) -> None:
    """A snapshot that ends above the high seqno, half received, is ROLLBACK to its start."""
    tokens = written(run, 6)
    begun, last = tokens[2].seqno, tokens[-1]
    answer = run.dcp().stream(
        run.vb, last.seqno - 1, uuid=last.uuid, snapshot=(begun, last.seqno + 50)
    ).answer  # fmt: skip
    _rolled_back(answer, begun)


@check(
    "rollback.nothing-of-snapshot",
    "hence producer sets SnapEndSeqno to SnapStartSeqno in its rollback calculations.",
    _PAGE,
)
def nothing_of_snapshot(run: Run) -> None:
    """If start is the snapshot's start, an end above the high seqno does not matter: OK."""
    last = written(run)[-1]
    answer = run.dcp().stream(
        run.vb, last.seqno - 1, uuid=last.uuid, snapshot=(last.seqno - 1, last.seqno + 50)
    ).answer  # fmt: skip
    need_status(answer)


@check(
    "rollback.all-of-snapshot",
    "hence producer sets SnapStartSeqno to SnapEndSeqno in its rollback calculations.",
    _PAGE,
)
def all_of_snapshot(run: Run) -> None:
    """If start is the snapshot's end, where it began does not matter: OK."""
    last = written(run)[-1]
    answer = run.dcp().stream(
        run.vb, last.seqno, uuid=last.uuid, snapshot=(0, last.seqno)
    ).answer  # fmt: skip
    need_status(answer)


@check("rollback.ahead", "Here consumer has a snapshot that is not present in the producer.", _PAGE)
def ahead(run: Run) -> None:
    """A complete snapshot above the high seqno is ROLLBACK to the high seqno, or ERANGE."""
    last = written(run)[-1]
    answer = run.dcp().stream(run.vb, last.seqno + 100, uuid=last.uuid).answer
    if answer.field != p.ERANGE:
        _rolled_back(answer, last.seqno)


@check(
    "rollback.zero-with-history",
    "We go through sections (3) and (4) below to determine if the consumer has a history"
    " mismatch with the producer or not.",
    _PAGE,
)
def zero_with_history(run: Run) -> None:
    """Start 0 with the newest uuid is OK."""
    last = written(run)[-1]
    need_status(run.dcp().stream(run.vb, 0, uuid=last.uuid).answer)


# -- a branch of history ---------------------------------------------------------------------------


class _Branched:
    """A partition whose history branched in the middle of ten changes."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.kept, self.undone = _halves(written(run, 10))
        self.old = self.kept[0].uuid
        self.at = self.kept[-1].seqno
        run.hook("branch", seqno=self.at)
        self.log = failover_log(need_status(run.dcp().ask(p.DCP_FAILOVER_LOG, run.vb)))
        need(bool(self.log), "the failover log is empty")

    def ask(self, start: int, uuid: int, snapshot: tuple[int, int] | None = None) -> Packet:
        """Return the answer to a stream request."""
        return self.run.dcp().stream(self.run.vb, start, uuid=uuid, snapshot=snapshot).answer


def _halves(tokens: list[Written]) -> tuple[list[Written], list[Written]]:
    return tokens[:5], tokens[5:]


@check(
    "branch.log",
    "When this happens an entry is created by generating a random VBucket UUID and"
    " associating it with the highest squence number",
    pages.FAILURES,
)
def log(run: Run) -> None:
    """After a branch the log begins with a new uuid at the seqno of the branch; the old follows."""
    made = _Branched(run)
    need(len(made.log) >= 2, f"the log has {len(made.log)} entries")
    need(made.log[0][0] != made.old, "the newest uuid is the old one")
    need(made.log[0][1] == made.at, f"it begins at {made.log[0][1]}, not {made.at}")
    need(made.log[1][0] == made.old, "the old uuid is not the next entry")


@check(
    "branch.rolls-back",
    "The consumer has to rollback till that point and resend the stream request with its"
    " snapshot info at the rollback point (upper in this case).",
    _PAGE,
)
def rolls_back(run: Run) -> None:
    """The old uuid with a complete snapshot above the branch is ROLLBACK to the branch."""
    made = _Branched(run)
    _rolled_back(made.ask(made.undone[-1].seqno, made.old), made.at)


@check(
    "branch.snapshot-across",
    "Consumer Snapshot mismatch (SnapStartSeqno <= upper < SnapEndSeqno)",
    _PAGE,
)
def snapshot_across(run: Run) -> None:
    """A half received snapshot across the branch is ROLLBACK to the snapshot's start."""
    made = _Branched(run)
    begun = made.kept[1].seqno
    bounds = (begun, made.undone[-1].seqno)
    _rolled_back(made.ask(made.undone[1].seqno, made.old, bounds), begun)


@check(
    "branch.snapshot-across-below",
    "Consumer Snapshot mismatch (SnapStartSeqno <= upper < SnapEndSeqno)",
    _PAGE,
)
def snapshot_across_below(run: Run) -> None:
    """The same with a start below the branch: the snapshot was not whole, so ROLLBACK."""
    made = _Branched(run)
    begun = made.kept[1].seqno
    bounds = (begun, made.undone[-1].seqno)
    _rolled_back(made.ask(made.kept[3].seqno, made.old, bounds), begun)


@check("branch.below", "Lagging Consumer (SnapEndSeqno <= upper)", _PAGE)
def below(run: Run) -> None:
    """The old uuid with a complete snapshot at or below the branch is OK."""
    made = _Branched(run)
    for token in (made.kept[1], made.kept[-1]):
        need_status(made.ask(token.seqno, made.old))


@check(
    "branch.answer-log",
    "This failover log should be persisted immediately after receiving the OK response.",
    pages.FAILURES,
)
def answer_log(run: Run) -> None:
    """The OK after a branch carries the new log."""
    made = _Branched(run)
    found = failover_log(need_status(made.ask(made.kept[1].seqno, made.old)))
    need(found == made.log, f"it carries {found}")


@check("branch.undone", "the Consumer removes all of its data after the rollback point", _PAGE)
def undone(run: Run) -> None:
    """A stream from 0 shows none of the undone changes, and GET does not find them."""
    _Branched(run)
    kv = run.kv()
    last = run.write(kv, run.key(50))
    got = run.complete(run.dcp(), end=last.seqno)
    keys = {each.key for each in got if each.opcode in CHANGES}
    ghosts = keys & {run.key(number) for number in range(5, 10)}
    need(not ghosts, f"it shows {sorted(ghosts)}")
    need_status(kv.ask(p.GET, run.vb, key=run.key(7)), p.ENOENT)


@check(
    "branch.new-history",
    "Producer then will send items from SnapStartSeqno in a new snapshot.",
    _PAGE,
)
def new_history(run: Run) -> None:
    """From the rollback point, the stream shows what the new history has, and obeys its markers."""
    made = _Branched(run)
    last = run.write(run.kv(), run.key(50), b"new")
    wire = run.dcp()
    got = ended(wire, run.opened(wire, made.at, end=last.seqno, uuid=made.old))
    shown = [(each.key, each.value) for each in got if each.opcode == p.MUTATION]
    need(shown == [(run.key(50), b"new")], f"it shows {shown}")
    fault = fault_of(got, made.at)
    need(not fault, fault)


@check(
    "branch.token",
    "A randomly generated number which is used to denote a history branch.",
    pages.TERMS,
)
def token(run: Run) -> None:
    """A change after the branch has the new uuid, and a seqno above the branch."""
    made = _Branched(run)
    later = run.write(run.kv(), run.key(50))
    need(later.uuid == made.log[0][0], f"its uuid is {later.uuid:x}")
    need(later.seqno > made.at, f"its seqno is {later.seqno}")


@check(
    "branch.stream-ends",
    "The stream closed because the vbucket is rolling back, client must reopen stream and"
    " follow rollback protocol.",
    pages.STREAM_END,
)
def stream_ends(run: Run) -> None:
    """An open stream that showed undone changes ends with reason 2 or 6, or its connection ends."""
    tokens = written(run, 10)
    kept, gone = _halves(tokens)
    wire = run.dcp()
    stream = run.opened(wire, kept[0].seqno - 1, uuid=kept[0].uuid)
    wire.messages(lambda each: seqno_of(each) == gone[-1].seqno)
    run.hook("branch", seqno=kept[-1].seqno)
    try:
        got = ended(wire, stream)
    except ClosedError:
        return
    need(got[-1].unpack("I")[0] in {2, 6}, f"the reason is {got[-1].extras.hex()}")


@check(
    "branch.twice",
    "The next point in the producer history is the next seqno in the producer's failover"
    " table if there is one",
    _PAGE,
)
def twice(run: Run) -> None:
    """After two branches, the oldest uuid rolls back to where the version after it began."""
    made = _Branched(run)
    more = run.fill(run.kv(), 6)
    run.hook("branch", seqno=more[2].seqno)
    _rolled_back(made.ask(made.undone[-1].seqno, made.old), made.at)
    _rolled_back(made.ask(more[-1].seqno, more[-1].uuid), more[2].seqno)


@check(
    "branch.strict-zero",
    "a consumer might need to update its state correctly when it has a diverging history"
    " even though at seqno 0.",
    _PAGE,
)
def strict_zero(run: Run) -> None:
    """After a branch, start 0 with the old uuid is OK: both share the history at 0."""
    made = _Branched(run)
    need_status(made.ask(0, made.old))


@check(
    "branch.restart",
    "A failover log entry is assigned to an active VBucket any time there might have been"
    " a history branch.",
    pages.TERMS,
)
def new_uuid_ok(run: Run) -> None:
    """The new uuid at the branch's seqno is OK, and shows only what is new."""
    made = _Branched(run)
    last = run.write(run.kv(), run.key(50))
    wire = run.dcp()
    got = ended(wire, run.opened(wire, made.at, end=last.seqno, uuid=made.log[0][0]))
    seqnos = [seqno_of(each) for each in got if each.opcode in CHANGES]
    need(seqnos == [last.seqno], f"it shows {seqnos}")


# -- purges ----------------------------------------------------------------------------------------


class _Purged:
    """A partition from which a deletion was purged."""

    def __init__(self, run: Run) -> None:
        self.run = run
        kv = run.kv()
        self.first = run.write(kv, run.key(1))
        run.write(kv, run.key(2))
        self.deleted = run.delete(kv, run.key(2))
        self.last = run.write(kv, run.key(3))
        run.hook("purge")

    def ask(self, start: int, flags: int = 0, value: bytes = b"") -> Packet:
        """Return the answer to a stream request."""
        wire = self.run.dcp(COLLECTIONS) if value else self.run.dcp()
        uuid = self.first.uuid
        return wire.stream(self.run.vb, start, uuid=uuid, flags=flags, value=value).answer


@check("purge.rolls-back", "The consumer needs to **full rollback to 0**", _PAGE)
def purge_rolls_back(run: Run) -> None:
    """A start below the purge seqno is ROLLBACK to 0."""
    made = _Purged(run)
    _rolled_back(made.ask(made.first.seqno), 0)


@check("purge.from-zero", "(if the requested start seqno is not already 0)", _PAGE)
def purge_from_zero(run: Run) -> None:
    """A stream from 0 is OK, and shows the documents that are left."""
    made = _Purged(run)
    got = run.complete(run.dcp(), end=made.last.seqno)
    keys = {each.key for each in got if each.opcode in CHANGES}
    need({run.key(1), run.key(3)} <= keys, "documents are missing")


@check("purge.above", "SnapStartSeqno < PurgeSeqno and StartSeqno != 0", _PAGE)
def purge_above(run: Run) -> None:
    """A start at the last seqno, above all purged deletions, is OK."""
    made = _Purged(run)
    need_status(made.ask(made.last.seqno))


@check(
    "purge.ignored",
    "DCP consumers can choose to opt-out of this rollback case by setting the `Ignore"
    " Purged Tombstones` flag",
    _PAGE,
)
def purge_ignored(run: Run) -> None:
    """Flag 0x80 with a start below the purge seqno is OK."""
    made = _Purged(run)
    need_status(made.ask(made.first.seqno, 0x80))


@check(
    "purge.ignored-not-uuid",
    "no other rollback checks such as UUID mismatch fail",
    pages.ADD_STREAM,
)
def purge_ignored_not_uuid(run: Run) -> None:
    """Flag 0x80 does not help an unknown uuid: ROLLBACK to 0."""
    made = _Purged(run)
    answer = run.dcp().stream(run.vb, made.first.seqno, uuid=_UNKNOWN, flags=0x80).answer
    _rolled_back(answer, 0)


def _purge_seqno(run: Run, made: _Purged) -> int:
    """Return the purge seqno of a marker of version 2.2."""
    wire = run.dcp(COLLECTIONS, controls=[("max_marker_version", "2.2")])
    got = run.complete(wire, end=made.last.seqno)
    found = [each for each in got if each.opcode == p.MARKER and each.extras == b"\2"]
    if not found:
        raise NotApplicableError("no marker has version 2.2")
    return int.from_bytes(found[0].value[36:44], "big")


@check("purge.in-marker", "Clients can use this purge-seqno to mitigate rollback", pages.MARKER)
def purge_in_marker(run: Run) -> None:
    """A marker of version 2.2 has a purge seqno at or above the purged deletion's."""
    made = _Purged(run)
    seqno = _purge_seqno(run, made)
    need(seqno >= made.deleted.seqno, f"it says {seqno}, deletion {made.deleted.seqno} is gone")


@check(
    "purge.named",
    "the most recent purge-seqno the client has observed which can reduce rollbacks",
    pages.STREAM_VALUE,
)
def purge_named(run: Run) -> None:
    """A request that names the server's purge seqno is OK below it."""
    made = _Purged(run)
    value = json.dumps({"purge_seqno": str(_purge_seqno(run, made))}).encode()
    need_status(made.ask(made.first.seqno, value=value))
