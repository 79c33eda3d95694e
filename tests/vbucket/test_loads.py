"""Loads: what goes straight into the store leaves what X_PUT_FRAMES leaves in the ordinary way.

One node loads, the other does not. They get the same packets, and then have the same documents,
seqnos, counts, records and rows of due documents, and gave the same answers.
"""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.message import (
    DELETION_EXTRAS,
    FIT_META,
    MUTATION_EXTRAS,
    PUT_FRAMES_FITTED_ANSWER,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import pack_xattrs
from support.memory_node import START_NS, LmdbNode, LoadingNode, OrdinaryNode, RestoringPeer
from vbucket.engine import lifecycle
from vbucket.engine.documents.expiry import Pager
from vbucket.engine.engine import SET
from vbucket.engine.loading.store_load import LoadRequest, Packet
from vbucket.engine.partition import BranchRefusedError, Hold
from vbucket.model.entry import PREFIX_BYTES, key_of
from vbucket.store.environment import StoreDamagedError, StoreFullError
from vbucket.store.records import BY_KEY_TABLE, BY_SEQNO_TABLE, EXPIRY_TABLE
from vbucket.store.store import StoreView

VB = 3
FORCE = 1
START_S = START_NS // 10**9
XATTRS = pack_xattrs([(b"_s", b"2")])


def frame(
    key: bytes, rev: int = 1, cas: int = START_NS, value: bytes = b"v", *,
    kind: int = Opcode.DCP_MUTATION, expiry: int = 0, vb_id: int = VB, has_xattrs: bool = False,
) -> bytes:  # fmt: skip
    """A frame as a stream sends it."""
    extras = MUTATION_EXTRAS.pack(77, rev, 9, expiry, 0, 0, 0)
    if kind == Opcode.DCP_EXPIRATION:
        extras = struct.pack(">QQI", 77, rev, START_S)
    elif kind == Opcode.DCP_DELETION:
        extras = DELETION_EXTRAS.pack(77, rev, 0)
    value = value if kind == Opcode.DCP_MUTATION else b""
    return pack_request(
        kind, vb_id=vb_id, opaque=0xABCD, cas=cas, extras=extras, key=key,
        value=XATTRS + value if has_xattrs else value, datatype=4 if has_xattrs else 0,
    )  # fmt: skip


def many(count: int, prefix: bytes = b"\0", vb_id: int = VB, **more: Any) -> list[bytes]:
    return [frame(prefix + b"k%d" % number, vb_id=vb_id, **more) for number in range(count)]


class Pair:
    """A node that loads, and one that does not."""

    def __init__(self, *, native: bool = True, body_bytes_target: int = 300) -> None:
        self.loading, self.ordinary = (
            node(partitions=8, body_bytes_target=body_bytes_target, item_cache_bytes=1 << 20)
            for node in (LoadingNode, OrdinaryNode)
        )
        self.loading.is_native = native
        self.nodes = (self.loading, self.ordinary)
        for node in self.nodes:
            manifest = node.engine.keyspace.manifest.create_collection("_default", "other")
            node.engine.keyspace.set_manifest(manifest)
            node.commit()
        self.connect()

    def connect(self) -> None:
        self.peers = [RestoringPeer(node) for node in self.nodes]
        self.answers: tuple[list[Frame], list[Frame]] = ([], [])

    def put(self, vb_id: int, frames: list[bytes], options: int) -> None:
        for peer, answers in zip(self.peers, self.answers, strict=True):
            answers.extend(peer.put(vb_id, frames, options))

    def settle(self) -> None:
        """Answer everything. Answers are equal."""
        self.loading.load()
        for node, peer, answers in zip(self.nodes, self.peers, self.answers, strict=True):
            node.commit()
            answers.extend(peer.answers())
        assert self.answers[0] == self.answers[1]

    def move(self, seconds: int) -> None:
        for node in self.nodes:
            node.now_ns += seconds * 10**9

    def check(self) -> None:
        """The nodes have the same, in memory and in the store."""
        self.settle()
        assert left_in_memory(self.loading) == left_in_memory(self.ordinary)
        for node in self.nodes:
            node.merge()
        assert left_in_memory(self.loading) == left_in_memory(self.ordinary)
        assert left_in_store(self.loading) == left_in_store(self.ordinary)


def left_in_memory(node: LoadingNode) -> list[Any]:
    found: list[Any] = []
    for part in node.engine.partitions:
        entries = node.engine.versions.entries(part, 1, part.high_seqno, 1 << 30)
        # Of what only the store has, the prefix is not read: the previous seqno may be missing.
        newest = {
            key: (node.engine.versions.newest_entry(part, key) or b"")[PREFIX_BYTES:]
            for key in map(key_of, entries)
        }
        found.append((
            part.high_seqno, part.committed_seqno, part.synced_seqno, part.max_cas,
            part.item_count, part.tally.to_document(), part.state, part.holds, part.vb_uuid,
            part.history_floor, part.purge_seqno, entries, newest,
        ))  # fmt: skip
    return found


def left_in_store(node: LoadingNode) -> list[Any]:
    snapshot = node.env.snapshot()
    view = StoreView(snapshot)
    found: list[Any] = [
        [(key, bytes(value)) for key, value in snapshot.range(table, b"\0")]
        for table in (BY_KEY_TABLE, EXPIRY_TABLE)
    ]
    found.append(view.partitions())
    snapshot.close()
    return found


names = st.sampled_from([b"\0a", b"\0b", b"\0c", b"\0d", b"\x08a", b"\x08b", b"\x09a", b"\0"])
frames_of = st.builds(
    frame, names, st.integers(0, 3) | st.just(2**48), st.integers(START_NS, START_NS + 3)
    | st.just(2**63 - 1), st.binary(max_size=40),
    kind=st.sampled_from(
        [Opcode.DCP_MUTATION] * 6 + [Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION]
    ),
    expiry=st.sampled_from([0, 0, START_S + 5, START_S + 60]), has_xattrs=st.sampled_from(
        [False, False, False, True]
    ),
)  # fmt: skip
sound = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 3), st.binary(max_size=40)),
    min_size=1, max_size=12, unique_by=lambda item: item[0],
).map(
    lambda items: [frame(b"\0n%d" % number, rev, value=value) for number, rev, value in items]
)  # fmt: skip
steps = st.one_of(
    st.tuples(st.just("put"), sound, st.sampled_from([FIT_META, FIT_META | FORCE])),
    st.tuples(st.just("put"), sound, st.just(FIT_META)),
    st.tuples(st.just("put"), st.lists(frames_of, min_size=1, max_size=6), st.just(FIT_META)),
    st.tuples(st.just("set"), st.sampled_from([b"\0a", b"\0n3"])),
    st.tuples(st.just("branch"), st.integers(0, 9)),
    st.sampled_from([("load",), ("merge",), ("crash",), ("manifest",), ("floor",), ("compact",)]),
)


def change(node: LoadingNode, step: str, argument: Any = None) -> None:
    """Do one step that is not about restores."""
    engine = node.engine
    engine.begin_batch(node.now_ns)
    part, manifest = engine.partitions[VB], engine.keyspace.manifest
    if step == "set":
        assert engine.store(SET, VB, argument, argument + b"set", 0, 0, 0, 0)[0] == Status.OK
    elif step == "branch":
        if argument == 0 or part.history_floor <= argument <= part.high_seqno:
            lifecycle.branch(engine, VB, argument)
    elif step == "manifest" and 9 in manifest.collections:
        engine.keyspace.set_manifest(manifest.drop_collection("_default", "more"))
    elif step == "manifest" and manifest.uid == 1:
        engine.keyspace.set_manifest(manifest.create_collection("_default", "more"))
    elif step == "floor" and part.committed_seqno > 1:
        engine.keyspace.raise_floor(VB, part.committed_seqno - 1, 0)


@settings(max_examples=120, deadline=None)
@given(story=st.lists(steps, min_size=1, max_size=12), native=st.booleans())
def test_it_leaves_what_the_ordinary_way_leaves(
    story: list[tuple[Any, ...]], *, native: bool
) -> None:
    pair = Pair(native=native)
    for step, *arguments in story:
        if step == "put":
            pair.put(VB, *arguments)
            continue
        pair.settle()
        pair.move(1)
        for node in pair.nodes:
            change(node, step, *arguments)
            node.commit()
            if step == "merge":
                node.merge()
            elif step == "compact":
                node.merge()
                node.compact([VB])
            elif step == "crash":
                node.crash()
        if step == "crash":
            pair.connect()
    pair.check()
    for node in pair.nodes:
        node.crash()
    assert left_in_memory(pair.loading) == left_in_memory(pair.ordinary)


def loaded(node: LoadingNode) -> int:
    return node.engine.loads.documents


@pytest.mark.parametrize("native", [True, False])
def test_new_documents_are_loaded_and_bypass_the_log(*, native: bool) -> None:
    pair = Pair(native=native)
    for vb_id in (VB, 4):
        pair.put(vb_id, many(100, vb_id=vb_id, expiry=START_S + 9), FIT_META)
        pair.put(vb_id, many(50, b"\x08", vb_id=vb_id), FIT_META)
    assert not pair.answers[0], "the answers wait for the load"
    log_bytes = sum(len(pair.loading.device.read(at)) for at in pair.loading.device.segments())
    pair.settle()
    assert loaded(pair.loading) == 300
    after = sum(len(pair.loading.device.read(at)) for at in pair.loading.device.segments())
    assert after < log_bytes + 2000
    assert [answer.extras for answer in pair.answers[0]] == [
        PUT_FRAMES_FITTED_ANSWER.pack(count, 0, 0) for count in (100, 50, 100, 50)
    ]
    # More of the same partition: the keys that are there are looked up.
    pair.put(VB, many(20, b"\0more"), FIT_META)
    pair.settle()
    assert loaded(pair.loading) == 320
    pair.put(VB, many(5, b"\0more", rev=2), FIT_META)
    pair.check()
    assert loaded(pair.loading) == 320, "these are there, and conflicts are for the ordinary way"


def test_streams_get_what_was_loaded() -> None:
    pair = Pair()
    messages = []
    for node in pair.nodes:
        peer = node.connect()
        peer.hello(Feature.COLLECTIONS)
        peer.open()
        peer.control(b"enable_noop", b"true")
        assert peer.stream(VB).status == Status.OK
        assert peer.drain()
        messages.append(peer)
    pair.put(VB, many(30), FIT_META)
    pair.settle()
    found = [peer.drain() for peer in messages]
    assert len(found[0]) == 31, "a marker and the documents"
    mutations = [[item for item in items if item.opcode == 0x57] for items in found]
    assert mutations[0] == mutations[1]


def test_while_a_load_waits_nothing_else_changes_the_partition() -> None:
    node = LoadingNode(partitions=8)
    peer = RestoringPeer(node)
    peer.put(VB, many(10))
    engine = node.engine
    assert engine.store(SET, VB, b"\0a", b"\0av", 0, 0, 0, 0)[0] == Status.ETMPFAIL
    assert engine.store(SET, 4, b"\0a", b"\0av", 0, 0, 0, 0)[0] == Status.OK
    requests = node.begin_load()
    # More packets of the partition come after the first ones.
    peer.put(VB, many(10, b"\0x"))
    for change in (
        lambda: lifecycle.branch(engine, VB, 0),
        lambda: lifecycle.failover(engine, VB),
        lambda: lifecycle.set_state(engine, VB, lifecycle.VbState.DEAD),
    ):
        with pytest.raises(BranchRefusedError, match="being loaded; try again in a second"):
            change()
    setter = node.connect()
    setter.hello(Feature.COLLECTIONS)
    answer = setter.ask(Opcode.SET_COLLECTIONS_MANIFEST, value=b'{"uid":"1","scopes":[]}')
    assert answer.status == Status.ETMPFAIL
    # Loads pause for whoever tries again: what comes now waits.
    other = RestoringPeer(node)
    for vb_id in (VB, 5):
        assert other.put(vb_id, many(3, b"\0y", vb_id=vb_id)) == []
        assert other.peer.state.pause.is_for_room
    assert Hold.LOADING not in engine.partitions[5].holds
    node.end_load(node.load_into_store(requests))
    assert engine.partitions[VB].high_seqno == 10
    assert Hold.LOADING in engine.partitions[VB].holds
    node.load()
    assert engine.partitions[VB].high_seqno == 20
    assert not engine.partitions[VB].holds
    assert [answer.status for answer in peer.answers()] == [Status.OK] * 2
    lifecycle.branch(engine, VB, 5)
    assert engine.partitions[VB].item_count == 5
    other.peer.session.resume(node.now_ns)
    assert not engine.loads.has_work, "for a while packets are applied in the ordinary way"
    assert (engine.partitions[VB].item_count, engine.partitions[5].item_count) == (8, 3)


def test_partitions_with_replicas_load_nothing() -> None:
    """Their replicas get changes from the log."""
    node = LoadingNode(partitions=8)
    node.engine.partitions[VB].has_copies = True
    assert not node.engine.loads.takes(VB, START_NS)
    assert node.engine.loads.takes(4, START_NS)


def test_sessions_wait_while_too_much_is_kept() -> None:
    node = LoadingNode(partitions=8)
    peer = RestoringPeer(node)
    frames = many(200, value=bytes(1200))
    for at in range(140):
        peer.put(VB, [*many(1, b"\0%d" % at), *frames])
    assert node.engine.loads.is_full
    assert peer.peer.state.pause.is_for_room
    node.load()
    assert not node.engine.loads.is_full


def test_control_entries_in_flight_do_not_end_below_a_load() -> None:
    """A group that was taken before a load and synced after it does not take its seqnos back."""
    node = LoadingNode(partitions=8)
    peer = RestoringPeer(node)
    peer.put(VB, many(10))
    requests = node.begin_load()
    part = node.engine.partitions[VB]
    node.engine.keyspace.add_control(part, {"kind": "floor", "seqno": 0, "purge": 0})
    group = node.take()
    node.end_load(node.load_into_store(requests))
    node.finish(group)
    node.commit()
    assert (part.committed_seqno, part.synced_seqno, part.merged_seqno) == (10, 10, 10)
    node.merge()
    node.crash()
    assert node.engine.partitions[VB].item_count == 10


def test_merge_whose_report_comes_late_does_not_end_below_load() -> None:
    node = LoadingNode(partitions=8)
    peer = RestoringPeer(node)
    peer.put(VB, many(10))
    requests = node.begin_load()
    part = node.engine.partitions[VB]
    node.engine.keyspace.add_control(part, {"kind": "floor", "seqno": 0, "purge": 0})
    node.begin_merge()
    sealed = [(at, node.device.read(at)) for at in node.merges.begin(node.device.segments())]
    report = node.merge_segments(sealed)
    node.end_load(node.load_into_store(requests))
    node.merges.merged(report)
    assert part.merged_seqno == 10
    assert node.engine.versions.newest_entry(part, b"\0k3") is not None


def test_a_branch_is_merged_before_a_load_comes_after_it() -> None:
    """Otherwise the log would undo the load at the next start."""
    node = LoadingNode(partitions=8)
    peer = RestoringPeer(node)
    peer.put(VB, many(10))
    node.load()
    lifecycle.branch(node.engine, VB, 0)
    node.commit()
    peer.put(VB, many(10, b"\0more"))
    assert node.engine.loads.wants_merge
    node.load()
    assert node.engine.loads.documents == 20
    node.crash()
    assert node.engine.partitions[VB].high_seqno == 10


def test_a_load_replaces_what_the_item_cache_says_of_its_keys() -> None:
    """The cache knows that a key which was rolled back does not exist."""
    for node in (LoadingNode(partitions=8, item_cache_bytes=1 << 20),
                 OrdinaryNode(partitions=8, item_cache_bytes=1 << 20)):  # fmt: skip
        engine, peer = node.engine, RestoringPeer(node)
        for key in (b"\0a", b"\0b"):
            assert engine.store(SET, VB, key, key + b"old", 0, 0, 0, 0)[0] == Status.OK
            node.commit()
        node.merge()
        lifecycle.branch(engine, VB, 1)
        node.commit()
        node.merge()
        assert peer.peer.ask(Opcode.GET, vb_id=VB, key=b"\0b").status == Status.KEY_ENOENT
        peer.put(VB, [frame(b"\0b", value=b"restored")])
        node.load()
        assert engine.loads.documents == (not isinstance(node, OrdinaryNode))
        assert peer.peer.ask(Opcode.GET, vb_id=VB, key=b"\0b").value == b"restored"


def test_loaded_documents_expire() -> None:
    """Also before those that the pager has looked at already."""
    node = LoadingNode(partitions=8)
    node.engine.store(SET, 4, b"\0a", b"\0av", 0, START_S + 20, 0, 0)
    node.merge()
    pager = Pager(node.engine, node.store)
    node.now_ns += 30 * 10**9
    assert pager.step(node.now_ns)
    peer = RestoringPeer(node)
    peer.put(VB, many(10, expiry=START_S + 10))
    node.load()
    assert node.engine.partitions[VB].item_count == 10
    assert pager.step(node.now_ns)
    assert pager.expired == 11
    assert node.engine.partitions[VB].item_count == 0


class _DiedError(Exception):
    """The process died here."""


def _die() -> None:
    raise _DiedError


def test_a_death_leaves_all_of_a_load_or_nothing() -> None:
    node = LoadingNode(partitions=8)
    peer = RestoringPeer(node)
    for vb_id in range(8):
        peer.put(vb_id, many(10, vb_id=vb_id))
    requests = node.begin_load()
    with pytest.raises(_DiedError):
        node.load_into_store(requests, _die)
    node.crash()
    assert [part.high_seqno for part in node.engine.partitions] == [0] * 8
    peer = RestoringPeer(node)
    for vb_id in range(8):
        peer.put(vb_id, many(10, vb_id=vb_id))
    node.load_into_store(node.begin_load())  # and the answer is lost
    node.crash()
    assert [part.high_seqno for part in node.engine.partitions] == [10] * 8
    assert [part.item_count for part in node.engine.partitions] == [10] * 8


def test_a_load_that_is_asked_for_again_has_no_effect() -> None:
    node = LoadingNode(partitions=8)
    peer = RestoringPeer(node)
    peer.put(VB, many(10))
    requests = node.begin_load()
    report = node.load_into_store(requests)
    before = left_in_store(node)
    assert node.load_into_store(requests) == report
    assert left_in_store(node) == before
    node.end_load(report)
    assert node.engine.partitions[VB].item_count == 10


def _spoiled(part: bytes, at: int, byte: int) -> bytes:
    return part[:at] + bytes([byte]) + part[at + 1 :]


CRAFTED = {
    "magic": lambda one: _spoiled(one, 0, 0x81),
    "opcode": lambda one: _spoiled(one, 1, 0x5F),
    "key length": lambda one: _spoiled(one, 2, 1),
    "no key": lambda one: _spoiled(one, 3, 1),
    "extras": lambda one: _spoiled(one, 4, 30),
    "datatype": lambda one: _spoiled(one, 5, 2),
    "partition": lambda one: _spoiled(one, 7, VB + 1),
    "body": lambda one: _spoiled(one, 11, one[11] - 1),
    "CAS 0": lambda one: one[:16] + bytes(8) + one[24:],
    "revision 0": lambda one: one[:32] + bytes(8) + one[40:],
    "lock time": lambda one: _spoiled(one, 49, 1),
    "collection": lambda one: _spoiled(one, 55, 0xFF),
    "system event": lambda one: _spoiled(one, 55, 1),
}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_frames_are_refused_and_nothing_is_stored(name: str, *, native: bool) -> None:
    pair = Pair(native=native)
    frames = many(5)
    pair.put(VB, [*frames[:4], CRAFTED[name](frames[4])], FIT_META)
    pair.settle()
    (answer,) = pair.answers[0]
    if name in {"collection", "system event"}:
        assert (answer.status, answer.value[-2:]) == (Status.OK, b"\0\x88")
    else:
        assert answer.status == Status.EINVAL
        assert b"frame 4" in answer.value
    assert loaded(pair.loading) == 0
    pair.check()


@pytest.mark.parametrize("native", [True, False])
def test_tables_of_lengths_that_lie_are_refused(*, native: bool) -> None:
    pair = Pair(native=native)
    one = frame(b"\0k")
    body = struct.pack(">I", len(one) - 24)
    for value, count in [
        (body + one, 2), (body + one + b"x", 1), (body + one[:-1], 1), (b"\xff" * 4 + one, 1),
        (body[:2], 1), (struct.pack(">II", len(one) - 24, 2**32 - 30) + one, 2),
    ]:  # fmt: skip
        for peer, answers in zip(pair.peers, pair.answers, strict=True):
            answers.extend(peer.put_value(VB, value, count))
        pair.settle()
        assert pair.answers[0][-1].status == Status.EINVAL
    assert loaded(pair.loading) == 0
    pair.check()


def test_a_store_not_what_the_server_takes_it_for_loads_nothing() -> None:
    node = LoadingNode(partitions=8)
    part = node.engine.partitions[VB]
    value = struct.pack(">I", len(frame(b"\0k")) - 24) + frame(b"\0k")
    request = LoadRequest(VB, 0, part.vb_uuid, 0, [Packet(1, value, 1)])
    before = left_in_store(node)
    for wrong, why in [
        (request._replace(high_seqno=7), "the partition changed"),
        (request._replace(vb_uuid=1), "the partition changed"),
        (request._replace(vb_id=99), "no such partition"),
    ]:
        (report,) = node.load_into_store([wrong])
        assert why in report.refusal
    node.engine.keyspace.manifest = node.engine.keyspace.manifest.create_scope("s")
    (report,) = node.load_into_store([request])
    assert "other collections" in report.refusal
    assert left_in_store(node) == before


def test_damaged_partitions_are_left_to_the_ordinary_way() -> None:
    node = LmdbLoading(partitions=8)
    try:
        peer = RestoringPeer(node)
        peer.put(VB, many(40))
        node.load()
        with node.env.write() as write:
            ((key, value),) = [
                (key, bytes(value)) for key, value in write.range(BY_SEQNO_TABLE, b"\0")
            ]
            write.put(BY_SEQNO_TABLE, key, value[:-1] + b"?")
        node.store.refresh()
        peer.put(VB, many(5, b"\0new"))
        peer.put(4, many(5, vb_id=4))
        node.load()
        assert loaded(node) == 45, "the other partition is loaded"
        assert [answer.status for answer in peer.answers()] == [Status.OK] * 3
        assert node.engine.partitions[VB].high_seqno == 45
    finally:
        node.close()


class LmdbLoading(LmdbNode, LoadingNode):
    """The same with a real LMDB."""


@pytest.mark.parametrize("error", [StoreFullError("no room"), StoreDamagedError("a page")])
def test_what_the_store_does_not_take_is_applied(error: Exception) -> None:
    pair = Pair()
    pair.put(VB, many(10), FIT_META)
    pair.put(VB, many(10, b"\0x"), FIT_META)
    assert pair.loading.begin_load()
    pair.put(VB, many(10, b"\0y"), FIT_META)
    pair.loading.engine.loads.refuse_all()
    pair.loading.apply()
    pair.check()
    assert loaded(pair.loading) == 0, error
