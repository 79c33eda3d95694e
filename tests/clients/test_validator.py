import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.errors import StreamViolationError
from clients.event import (
    Deletion,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    StreamFailed,
    StreamOpened,
    SystemEvent,
)
from clients.position import Position
from clients.validator import Columns, Held, StreamValidator
from dcp.wire.message import MarkerFlag
from vbucket.model.manifest import SystemEventKind

LOG = ((5, 0),)


def opened(start=0, snap_start=None):
    return StreamOpened(1, LOG, start, start if snap_start is None else snap_start)


def marker(start, end):
    return SnapshotStart(1, start, end, 1)


def history(start, end):
    return SnapshotStart(1, start, end, 1 | MarkerFlag.HISTORY | MarkerFlag.MAY_DUPLICATE_KEYS)


def change(seqno, key=None, value=b"v", rev_seqno=1, previous=None):
    key = key or b"k%d" % seqno
    return Mutation(1, key, value, seqno, rev_seqno, 100 + seqno, 0, 0, previous_value=previous)


def deletion(seqno, key):
    return Deletion(1, key, seqno, 1, 100 + seqno)


def end(seqno):
    return SnapshotEnd(1, seqno)


def feed(*events, validator=None):
    validator = validator or StreamValidator()
    for event in events:
        validator.observe(event)
    return validator


def test_a_stream_that_keeps_the_rules():
    validator = feed(
        opened(), marker(0, 3), change(1, b"a"), change(3, b"b"), end(3),
        marker(4, 5), change(4, b"a", b"2"), SeqnoAdvanced(1, 5), end(5),
        marker(6, 6), deletion(6, b"b"), end(6),
        StreamEnded(1, 0, will_resume=False),
    )  # fmt: skip
    assert validator.documents() == {b"a": Held(b"2", 104, 4)}
    assert validator.seqnos() == {1: 6}
    assert validator.event_count == 13


VIOLATIONS = {
    "change before the opening": ([change(1)], "no stream is open"),
    "marker before the opening": ([marker(0, 1)], "no stream is open"),
    "end before the opening": ([StreamEnded(1, 0, will_resume=False)], "no stream is open"),
    "change without a snapshot": ([opened(), change(1)], "outside any snapshot"),
    "advance without a snapshot": (
        [opened(), SeqnoAdvanced(1, 1)],
        "outside any snapshot",
    ),
    "change above the snapshot": ([opened(), marker(0, 2), change(3)], r"outside .* 0\.\.2"),
    "change below the snapshot": (
        [opened(5), marker(6, 9), change(5)],
        r"outside the snapshot 6\.\.9",
    ),
    "seqno falls": ([opened(), marker(0, 9), change(5), change(4)], "seqno 4 after seqno 5"),
    "seqno repeated": ([opened(), marker(0, 9), change(5), change(5, b"x")], "5 after seqno 5"),
    "deletion falls": ([opened(), marker(0, 9), change(5), deletion(4, b"x")], "4 after seqno 5"),
    "key twice": ([opened(), marker(0, 9), change(1, b"a"), change(2, b"a")], "b'a' twice"),
    "key twice, deleted": (
        [opened(), marker(0, 9), change(1, b"a"), deletion(2, b"a")],
        "b'a' twice",
    ),
    "next marker too early": (
        [opened(), marker(0, 9), change(1), marker(10, 11)],
        r"before the snapshot 0\.\.9 is complete",
    ),
    "gap between markers": (
        [opened(), marker(0, 1), change(1), end(1), marker(3, 4)],
        "it must start at 2",
    ),
    "markers overlap": (
        [opened(), marker(0, 1), change(1), end(1), marker(1, 4)],
        "it must start at 2",
    ),
    "first marker leaves a gap": ([opened(5), marker(7, 9)], "first marker"),
    "first marker before the request": ([opened(5, 3), marker(2, 9)], "first marker"),
    "marker upside down": ([opened(), marker(5, 4)], "a marker 5..4"),
    "marker behind us": ([opened(5), marker(5, 5)], "at seqno 5"),
    "end not reached": ([opened(), marker(0, 3), change(1), end(3)], "the end 3 of a snapshot"),
    "end that was not announced": ([opened(), marker(0, 3), change(3), end(2)], "end 2"),
    "end without a snapshot": ([opened(), end(0)], "no snapshot was announced"),
    "complete inside a snapshot": (
        [opened(), marker(0, 3), change(1), StreamEnded(1, 0, will_resume=False)],
        "ended with reason 0 .ok. at seqno 1",
    ),
    "change after the end": (
        [opened(), StreamEnded(1, 0, will_resume=False), change(1)],
        "no stream is open",
    ),
    "marker after the end": (
        [opened(), StreamEnded(1, 2, will_resume=True), marker(0, 1)],
        "no stream is open",
    ),
    "change after a refusal": (
        [opened(), StreamFailed(1, 0x22, "w", "h"), marker(0, 1)],
        "no stream is open",
    ),
    "opened with a gap": (
        [opened(), marker(0, 1), change(1), end(1), opened(4)],
        "opened at seqno 4, but the consumer is at 1",
    ),
    "opened again below": (
        [opened(), marker(0, 1), change(1), end(1), opened(0)],
        "opened at seqno 0, but the consumer is at 1",
    ),
    "revision left out of a history": (
        [opened(), history(0, 9), change(1, b"a", rev_seqno=4), change(5, b"a", rev_seqno=6)],
        "revision 6 after 4 in the history snapshot 0..9",
    ),
    "previous value that was not held": (
        [opened(), history(0, 9), change(1, b"a"), change(2, b"a", b"w", 2, previous=b"x")],
        "has the previous value b.x., but the consumer has b.v. .seqno 1.",
    ),
    "key twice after a history": (
        [
            opened(),
            history(0, 1),
            change(1, b"a"),
            end(1),
            marker(2, 4),
            change(2, b"a"),
            change(4, b"a"),
        ],
        "b'a' twice",
    ),
    "rollback up": ([opened(5), Rollback(1, 5, 5, 5, "r")], "not below the current seqno"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_named(name):
    events, why = VIOLATIONS[name]
    validator = feed(*events[:-1])
    with pytest.raises(StreamViolationError, match=why) as caught:
        validator.observe(events[-1])
    assert caught.value.vb_id == 1


def test_history_snapshot_repeats_keys_with_what_they_replaced():
    validator = feed(
        opened(), marker(0, 3), change(3, b"a", b"3", 7), end(3), history(4, 6),
        change(4, b"a", b"4", 8, previous=b"3"), change(5, b"a", b"5", 9, previous=b"4"),
        change(6, b"b"), end(6),
    )  # fmt: skip
    assert validator.documents() == {b"a": Held(b"5", 105, 5), b"b": Held(b"v", 106, 6)}


def test_named_streams_of_a_partition_are_apart():
    validator = feed(opened(), marker(0, 1), change(1, b"a"))
    for event in (opened(), marker(0, 1), change(1, b"a"), end(1)):
        validator.observe(event, stream_id=2)
    feed(end(1), validator=validator)
    assert validator.seqnos() == {1: 1, 2 << 16 | 1: 1}


def test_partitions_are_apart():
    validator = feed(opened(), marker(0, 9), change(5))
    other = change(1)
    other.vb_id = 2
    with pytest.raises(StreamViolationError, match="partition 2"):
        validator.observe(other)


def test_snapshot_goes_on_after_a_lost_connection():
    validator = feed(
        opened(), marker(0, 9), change(5, b"a"),
        opened(5, 0), marker(0, 12), change(7, b"a"), change(12), end(12),
    )  # fmt: skip
    assert validator.seqnos() == {1: 12}


def test_interrupted_snapshot_ends_with_any_reason_but_ok():
    feed(opened(), marker(0, 9), change(5), StreamEnded(1, 4, will_resume=True), opened(5, 0))


def test_resuming_consumer_is_checked_from_its_checkpoint():
    validator = StreamValidator()
    validator.begin({1: Position(LOG, 9, 9, 9)})
    with pytest.raises(StreamViolationError, match="but the consumer is at 9"):
        validator.observe(opened(8))


def test_rollback_restores_what_was_held():
    validator = feed(
        opened(), marker(0, 2), change(1, b"a"), change(2, b"b"), end(2),
        marker(3, 5), change(3, b"a", b"2"), deletion(4, b"b"), change(5, b"c"), end(5),
    )  # fmt: skip
    assert set(validator.documents()) == {b"a", b"c"}
    feed(StreamEnded(1, 6, will_resume=True), Rollback(1, 2, 2, 5, "r"), validator=validator)
    assert validator.documents() == {b"a": Held(b"v", 101, 1), b"b": Held(b"v", 102, 2)}
    assert validator.rollback_count == 1
    feed(Rollback(1, 0, 0, 2, "r"), validator=validator)
    assert validator.documents() == {}


def test_differences_are_said_in_words():
    validator = feed(opened(), marker(0, 3), change(1, b"a"), change(2, b"b"), change(3, b"c"))
    assert validator.compare({b"a": b"v", b"b": b"v", b"c": b"v"}) == []
    missing, extra, other = validator.compare({b"a": b"v", b"b": b"w", b"z": b"v"})
    assert missing == "b'z': the server has it, the consumer does not"
    assert extra == "b'c': the consumer has it (seqno 3), the server does not"
    assert other == "b'b': the consumer has b'v' (seqno 2), the server has b'w'"


def test_documents_of_a_dropped_collection_go_until_rolled_back():
    def of(collection_id, event):
        event.collection_id = collection_id
        return event

    drop = SystemEvent(1, 3, SystemEventKind.DROP_COLLECTION, 2, 0, 8, "")
    validator = feed(
        opened(), marker(0, 3), of(8, change(1, b"a")), of(9, change(2, b"a")), drop, end(3)
    )
    assert validator.documents(8) == {}
    assert set(validator.documents(9)) == {b"a"}
    feed(StreamEnded(1, 6, will_resume=True), Rollback(1, 2, 2, 3, "r"), validator=validator)
    assert set(validator.documents(8)) == {b"a"}


# -- mutations that come together ------------------------------------------------------------------


def columns(events):
    return Columns(
        [each.key for each in events], [each.value for each in events],
        [each.seqno for each in events], [each.rev_seqno for each in events],
        [each.cas for each in events],
    )  # fmt: skip


def state_of(validator):
    part = validator._partitions[1]
    keys = {collection_id: keys for collection_id, keys in part.keys.items() if keys}
    return part.seqno, keys, part.revisions, part.held, validator.event_count


def outcome(check):
    try:
        check()
    except StreamViolationError as error:
        return str(error)
    return None


STEPS = st.tuples(
    st.sampled_from([1, 1, 1, 2, 0, -1]), st.integers(0, 5), st.integers(-1, 2), st.booleans()
)
"""Distance of seqnos, number of a key, distance of its revision, whether another run begins."""


@settings(max_examples=300)
@given(
    steps=st.lists(STEPS, min_size=1, max_size=12), many=st.booleans(),
    flags=st.sampled_from(
        [0, MarkerFlag.MAY_DUPLICATE_KEYS, MarkerFlag.HISTORY, history(0, 1).flags]
    ),
    last=st.integers(3, 14), is_open=st.booleans(),
)  # fmt: skip
def test_mutations_together_are_checked_as_one_by_one(steps, many, flags, last, is_open):
    together, single = StreamValidator(), StreamValidator()
    for validator in (together, single):
        feed(opened(), SnapshotStart(1, 0, last, flags), validator=validator)
        if not is_open:
            feed(StreamEnded(1, 2, will_resume=True), validator=validator)
    runs, seqno, revisions = [[]], 0, {}
    for at, (step, number, more, is_new) in enumerate(steps):
        key = b"%d" % (at if many else number)
        seqno += step
        revisions[key] = revisions.get(key, 1) + (1 if more else 0) + (more == 2)
        if is_new and runs[-1]:
            runs.append([])
        runs[-1].append(change(seqno, key, b"%d" % at, revisions[key]))
    for run in runs:
        found = outcome(lambda run=run: together.observe_run(1, columns(run)))
        expected = outcome(lambda run=run: feed(*run, validator=single))
        assert found == expected
        assert state_of(together) == state_of(single)
        if found is not None:
            return


def test_mutations_together_belong_to_their_collection():
    validator = feed(opened(), marker(0, 9))
    validator.observe_run(1, columns([change(1, b"a"), change(2, b"b")]), 8)
    validator.observe_run(1, columns([change(3, b"a")]), 9)
    assert set(validator.documents(8)) == {b"a", b"b"}
    with pytest.raises(StreamViolationError, match="b'a' twice"):
        validator.observe_run(1, columns([change(4, b"c"), change(5, b"a")]), 8)
    assert validator.seqnos() == {1: 5}
