"""A partition's CAS comes back to the clock: live, through crashes and merges, for all who read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import DATATYPE_XATTR, pack_xattrs
from support.memory_node import START_NS, LmdbNode, MemoryNode
from vbucket.check.finding import Kind
from vbucket.check.partition_check import PartitionCheck
from vbucket.engine.engine import DELETION, MUTATION, SET
from vbucket.engine.mending import Mending, MendingRefusedError
from vbucket.engine.partition import VbState
from vbucket.model.entry import DATATYPE_AT, value_of
from vbucket.model.ids import CAS_AHEAD_NS, CAS_DRIFT_NS
from vbucket.store.records import (
    Mended,
)
from vbucket.upkeep.retention import Planner, Windows, seqno_at
from vbucket.upkeep.seqno_at_time import seqno_before

VB = 5
FAR = 2**63 - 1
SECOND_NS = 10**9


@pytest.fixture(params=[MemoryNode, LmdbNode])
def node(request: pytest.FixtureRequest) -> Iterator[MemoryNode]:
    node = request.param()
    yield node
    if isinstance(node, LmdbNode):
        node.close()


def poison(node: MemoryNode, *, is_merged: bool) -> dict[bytes, tuple[bytes, int]]:
    """Leave what an older version left; return key -> value and flags."""
    engine = node.engine
    documents: dict[bytes, tuple[bytes, int]] = {}

    def put(key: bytes, value: bytes, flags: int) -> None:
        assert engine.store(SET, VB, b"\0" + key, b"\0" + key + value, flags, 0, 0, 0)[0] == 0
        documents[key] = value, flags

    for number in range(20):
        put(b"before %d" % number, b"%d" % number, number)
    engine.cas_drift_ns = 2**63
    engine.put_with_meta(MUTATION, VB, b"\0far", b"\0farv", 7, 0, 1, 3, FAR, 0)
    documents[b"far"] = b"v", 7
    engine.cas_drift_ns = CAS_DRIFT_NS
    for number in range(10):
        put(b"after %d" % number, b"x%d" % number, number)
    put(b"before 3", b"again", 9)
    put(b"gone", b"v", 0)
    assert engine.delete(VB, b"\0gone", 0)[0] == 0
    del documents[b"gone"]
    assert engine.partitions[VB].max_cas > FAR
    node.merge() if is_merged else node.commit()
    return documents


def mend(node: MemoryNode, vb_id: int = VB) -> Mending:
    mending = Mending(node.engine, vb_id, node.now_ns)
    while not mending.step(node.now_ns, 7):
        node.commit()
    node.commit()
    return mending


@pytest.mark.parametrize("is_merged", [False, True])
def test_xattrs_stay(node: MemoryNode, is_merged: bool) -> None:
    """Of a document, and of a deletion that a CAS from elsewhere made one that needs mending."""
    engine, section = node.engine, pack_xattrs([(b"_s", b"1")])
    engine.cas_drift_ns = 2**63
    for kind, key, value in ((MUTATION, b"\0full", section + b"v"), (DELETION, b"\0gone", section)):
        engine.put_with_meta(kind, VB, key, key + value, 0, 0, DATATYPE_XATTR, 3, FAR, 0)
    engine.cas_drift_ns = CAS_DRIFT_NS
    node.merge() if is_merged else node.commit()
    mending = mend(node)
    assert (mending.documents, mending.deletions) == (1, 1)
    node.merge()
    part = engine.partitions[VB]
    for key, value in ((b"\0full", section + b"v"), (b"\0gone", section)):
        entry = engine.versions.newest_entry(part, key)
        assert entry is not None
        assert (value_of(entry), entry[DATATYPE_AT]) == (value, DATATYPE_XATTR)


def cas_max(node: MemoryNode) -> int:
    return (node.now_ns & ~0xFFFF) + CAS_DRIFT_NS


def shown(node: MemoryNode) -> dict[bytes, tuple[bytes, int]]:
    """What documents there are, from the engine."""
    found = {}
    versions = node.engine.versions
    for key in (*versions.keys_in_store(VB, b"", 1000),
                *(key for _, key in versions.keys_in_memory(VB, 1, 10**6, 1000))):  # fmt: skip
        document = node.engine.get(VB, key)
        if not isinstance(document, int):
            found[key[1:]] = document.value, int.from_bytes(document.flags, "big")
    return found


def highest_cas(node: MemoryNode) -> int:
    """The highest CAS of what is newest, deletions too."""
    keys = {key for _, key in node.engine.versions.keys_in_memory(VB, 1, 10**6, 1000)}
    keys |= set(node.engine.versions.keys_in_store(VB, b"", 1000))
    metas = (node.engine.newest_meta(VB, key) for key in keys)
    return max(meta.cas for meta in metas if meta is not None)


@pytest.mark.parametrize("is_merged", [True, False])
def test_what_is_newest_has_a_cas_that_can_be_believed(node: MemoryNode, is_merged: bool) -> None:
    documents = poison(node, is_merged=is_merged)
    part = node.engine.partitions[VB]
    high_seqno, items = part.high_seqno, part.item_count
    mending = mend(node)
    assert (mending.documents, mending.deletions) == (12, 1)
    assert shown(node) == documents
    assert part.item_count == items
    assert part.high_seqno == high_seqno + 13
    assert cas_max(node) < part.max_cas < cas_max(node) + 100
    assert highest_cas(node) <= part.max_cas
    far = node.engine.meta(VB, b"\0far")
    assert not isinstance(far, int)
    assert (far.rev_seqno, far.datatype, far.flags) == (4, 0, 7), "its value is no JSON"
    peer = node.connect()
    peer.hello()
    assert peer.set(VB, b"new", b"v").cas == part.max_cas, "and rises on"
    again = mend(node)
    assert (again.documents, again.deletions, again.before_cas) == (0, 0, part.max_cas)


@pytest.mark.parametrize("is_merged", [True, False])
def test_it_is_durable(node: MemoryNode, is_merged: bool) -> None:
    documents = poison(node, is_merged=is_merged)
    mend(node)
    part = node.engine.partitions[VB]
    state = part.max_cas, part.mended, part.high_seqno
    node.crash()
    part = node.engine.partitions[VB]
    assert (part.max_cas, part.mended, part.high_seqno) == state
    node.merge()
    node.crash()
    part = node.engine.partitions[VB]
    assert (part.max_cas, part.mended, part.high_seqno) == state
    assert shown(node) == documents
    peer = node.connect()
    peer.hello()
    assert peer.set(VB, b"new", b"v").cas == state[0] + 1


def test_a_crash_in_the_middle_leaves_the_rest_for_another_time(node: MemoryNode) -> None:
    documents = poison(node, is_merged=True)
    mending = Mending(node.engine, VB, node.now_ns)
    assert not mending.step(node.now_ns, 5)
    node.commit()
    node.crash()
    node.engine.begin_batch(node.now_ns)
    assert node.engine.partitions[VB].max_cas < FAR
    assert highest_cas(node) > FAR
    rest = mend(node)
    assert mending.documents + rest.documents == 12
    assert highest_cas(node) < FAR
    assert shown(node) == documents


def test_writes_go_on_in_between(node: MemoryNode) -> None:
    documents = poison(node, is_merged=True)
    mending = Mending(node.engine, VB, node.now_ns)
    peer = node.connect()
    peer.hello()
    number = 0
    while not mending.step(node.now_ns, 3):
        key = b"after %d" % (9 - number % 10)
        assert peer.set(VB, key, b"own %d" % number).cas < FAR
        documents[key] = b"own %d" % number, 0
        number += 1
    assert shown(node) == documents
    assert highest_cas(node) < FAR


def test_streams_show_it_as_changes_and_history_goes_on(node: MemoryNode) -> None:
    documents = poison(node, is_merged=True)
    before = node.engine.partitions[VB].high_seqno
    mend(node)
    peer = node.connect()
    peer.open()
    peer.stream(VB, before, uuid=node.engine.partitions[VB].vb_uuid)
    changes = [frame for frame in peer.drain() if frame.opcode in {MUTATION, DELETION}]
    assert len(changes) == 13
    assert all(frame.cas < FAR for frame in changes)
    for frame in changes:
        if frame.opcode == Opcode.DCP_MUTATION:
            assert documents[frame.key][0] == frame.value
    whole = node.connect()
    whole.open(b"whole")
    whole.stream(VB, end=node.engine.partitions[VB].high_seqno)
    seen = {frame.key: frame.value for frame in whole.drain() if frame.opcode == MUTATION}
    assert seen == {key: value for key, (value, _) in documents.items()}


def test_a_rollback_to_before_brings_back_what_was(node: MemoryNode) -> None:
    poison(node, is_merged=True)
    before = node.engine.partitions[VB].high_seqno
    mend(node)
    node.merge()
    node.engine.keyspace.branch(VB, before - 5)
    node.commit()
    part = node.engine.partitions[VB]
    assert part.mended is not None
    assert part.mended.seqno == before - 5
    assert highest_cas(node) > FAR
    node.merge()
    node.crash()
    node.engine.begin_batch(node.now_ns)
    assert node.engine.partitions[VB].mended == part.mended
    mend(node)
    assert highest_cas(node) < FAR
    node.engine.keyspace.branch(VB, 0)
    node.merge()
    assert node.engine.partitions[VB].max_cas < FAR


def check(node: MemoryNode) -> list[Kind]:
    record = node.store.partition(VB)
    assert record is not None
    found = PartitionCheck(
        node.env.snapshot(),
        VB,
        record,
        node.store.manifest(),
        cas_max=cas_max(node) + CAS_AHEAD_NS,
    )
    return [finding.kind for finding in found.steps() if finding]


def test_a_check_names_it_before_and_nothing_after(node: MemoryNode) -> None:
    poison(node, is_merged=True)
    assert check(node) == [Kind.CAS]
    mend(node)
    node.merge()
    node.now_ns += SECOND_NS
    assert check(node) == []
    node.engine.keyspace.branch(VB, 25)
    node.merge()
    assert check(node) == [Kind.CAS], "what came back has the CAS that it had"


def test_time_can_be_told_again(node: MemoryNode) -> None:
    """CAS is time. What came before the mending is older than that, whatever it says."""
    poison(node, is_merged=True)
    mended_seqno = node.engine.partitions[VB].high_seqno
    mend(node)
    hour_ns = 3600 * SECOND_NS
    node.now_ns += 3 * hour_ns
    peer = node.connect()
    peer.hello()
    for number in range(200):
        peer.set(VB, b"later %d" % (number % 3), b"v")
    node.merge()
    record = node.store.partition(VB)
    assert record is not None
    end = record.last_seqno
    stuck = seqno_at(node.store, VB, end, node.now_ns - hour_ns)
    assert stuck < mended_seqno, "by CAS alone all seems newer"
    found = seqno_at(node.store, VB, end, node.now_ns - hour_ns, mended=record.mended)
    assert found == end - 200
    windows = Windows(hour_ns, 1 << 30, 0)
    (step,), _, _ = Planner().plan(node.store, [VB], windows, node.now_ns, is_forced=True)
    assert step.floor == end - 200, "the history window moves on"
    versions = record.versions
    node.raise_floor(VB, step.floor, 0)
    node.commit()
    node.compact([VB])
    after = node.store.partition(VB)
    assert after is not None
    assert after.versions < versions
    assert seqno_before(node.engine.versions.frames, VB, end, START_NS) == 0


@pytest.mark.parametrize("state", [VbState.REPLICA, VbState.DEAD])
def test_only_active_partitions_are_mended(node: MemoryNode, state: VbState) -> None:
    node.engine.partitions[VB].state = state
    with pytest.raises(MendingRefusedError, match=f"is {state.name.lower()}"):
        Mending(node.engine, VB, node.now_ns)


def test_it_stops_where_writes_are_held_back(node: MemoryNode) -> None:
    poison(node, is_merged=True)
    mending = Mending(node.engine, VB, node.now_ns)
    node.engine.partitions[VB].hold_writes("a stream", "a takeover is under way")
    with pytest.raises(MendingRefusedError, match="takeover"):
        mending.step(node.now_ns)
    node.engine.partitions[VB].release_writes("a stream")
    assert mending.step(node.now_ns) in {True, False}


def test_a_cas_held_from_before_is_refused_and_the_new_one_taken(node: MemoryNode) -> None:
    poison(node, is_merged=True)
    peer = node.connect()
    peer.hello()
    held = peer.ask(Opcode.GET, vb_id=VB, key=b"far").cas
    mend(node)
    store = partial(peer.ask, Opcode.SET, vb_id=VB, key=b"far", value=b"w", extras=bytes(8))
    assert store(cas=held).status == Status.KEY_EEXISTS
    assert store(cas=peer.ask(Opcode.GET, vb_id=VB, key=b"far").cas).status == Status.OK


STEPS = st.lists(
    st.sampled_from(
        ["set", "poison", "mend", "merge", "delete", "lower", "branch", "later", "freeze", "crash"]
    ),
    min_size=12,
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(STEPS, st.lists(st.integers(0, 100), min_size=25, max_size=25))
def test_log_and_store_agree_on_the_highest_cas(steps: list[str], draws: list[int]) -> None:
    """Whatever comes between: after each commit a crash, and each merge, changes nothing of it."""
    node = MemoryNode()
    is_frozen = is_all = False
    for step, draw in zip(steps, draws, strict=False):
        engine, part = node.engine, node.engine.partitions[VB]
        key = b"\0k%d" % (draw % 4)
        engine.begin_batch(node.now_ns)
        if step == "set":
            assert engine.store(SET, VB, key, key + b"v", 0, 0, 0, 0)[0] == 0
        elif step == "delete":
            engine.delete(VB, key, 0)
        elif step == "poison":
            engine.cas_drift_ns = 2**63
            engine.put_with_meta(MUTATION, VB, key, key, 0, 0, 0, 9, FAR + draw, 0,
                                 resolves_conflict=False)  # fmt: skip
            engine.cas_drift_ns = CAS_DRIFT_NS
        elif step in {"mend", "lower"}:  # all of it, or the beginning
            mending = Mending(engine, VB, node.now_ns)
            while step == "mend" and not mending.step(node.now_ns, 2):
                pass
        elif step == "branch":
            at = draw % (part.high_seqno + 1)
            engine.keyspace.branch(VB, at if at >= part.history_floor else 0)
        elif step == "later":
            node.now_ns += draw * SECOND_NS
        elif step == "freeze" and not is_frozen:
            node.begin_merge()
            is_frozen = True
        elif step == "merge":
            is_all = not is_frozen
            if is_all:
                node.begin_merge()
            node.end_merge()
            is_frozen = False
        node.commit()
        part = node.engine.partitions[VB]
        state = part.max_cas, part.mended, part.high_seqno
        if step == "merge" and is_all:
            record = node.store.partition(VB)
            assert record is not None
            mended = Mended(*record.mended) if record.mended else None
            assert (record.max_cas, mended, record.high_seqno) == state
        if step == "crash":
            node.crash()
            is_frozen = False
            part = node.engine.partitions[VB]
            assert (part.max_cas, part.mended, part.high_seqno) == state
