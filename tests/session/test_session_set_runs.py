"""Changes that come together: the loop in C against its twin in Python, after the same packets.

Everything that a change touches must be equal: answers, log, memtables, item cache, counts, notes.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import google_crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dcp.session.node_facts import Limits
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR, pack_xattrs
from support.memory_node import LmdbNode, MemoryNode, Peer
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Hold, Partition, VbState
from vbucket.engine.versions import Meta
from vbucket.native import new_staged, set_run
from vbucket.store.environment import StoreDamagedError
from vbucket.store.lmdb.page_sums import ENTRIES_AT, SUMS_FILE_NAME
from vbucket.store.records import BY_KEY_TABLE

if TYPE_CHECKING:
    from vbucket.native.loops import SetRun

pytestmark = pytest.mark.skipif(
    new_staged() is None, reason="the loops in C are not built (scripts/compile)"
)

PARTITIONS = 4
KEYS = tuple(b"\0" + bytes([letter]) * length for letter in b"ab" for length in (1, 2, 9, 249, 250))
VALUE_BYTES_MAX = 200
VALUES = st.integers(0, 40) | st.sampled_from((VALUE_BYTES_MAX, VALUE_BYTES_MAX + 1))
FEATURES = (
    Feature.COLLECTIONS, Feature.XERROR, Feature.JSON, Feature.SNAPPY, Feature.MUTATION_SEQNO,
)  # fmt: skip
FORMS: dict[str, tuple[Feature, ...] | None] = {
    "all": FEATURES,
    "no tokens": FEATURES[:-1],
    "no collections": FEATURES[1:],
    "tokens only": (Feature.MUTATION_SEQNO,),
    "xerror only": (Feature.XERROR,),
    "no hello": None,
}
"""What a client negotiates. Without HELLO its keys are hashed to their partitions."""
NUMBERS = (
    "state", "high_seqno", "committed_seqno", "synced_seqno", "merged_seqno",
    "max_cas", "item_count", "last_group", "recent_bytes", "older_bytes", "vb_uuid",
)  # fmt: skip
KINDS = (
    *["set"] * 12,
    *["number"] * 4, *["incr"] * 3, "decr", "incrq", "decrq", "incr only", "incr expiry",
    "incr cas", "incr value", *["touch"] * 2, "touch 0", "touch value", "addq", "replace",
    "replaceq", "add cas", "add expiry", "deleteq", "delete extras", "delete cas", "own cas",
    "own cas delete", "own cas incr", "own cas replaceq",
    *["append"] * 2, "appendq", *["prepend"] * 2, "prependq", "append cas", "append extras",
    "append json", "own cas append", *["gat"] * 3, *["gatq"] * 2, "gat value",
    "flags", "json", "snappy", "xattr", *["expiry"] * 3, "30 days", "over 30 days", "late",
    *["setq"] * 3, "add", "get", "cas", "delete", "collection", "no key", "empty key",
    "long key", "key beyond", "no extras", "few extras", "nowhere", "noop",
)  # fmt: skip
COMMANDS = st.lists(
    st.tuples(
        st.sampled_from(KINDS), st.integers(0, PARTITIONS - 1), st.sampled_from(KEYS), VALUES
    ),
    min_size=1,
    max_size=24,
)


NUMBER_TEXTS = (
    b"0", b"17", b"007", b"18446744073709551615", b"18446744073709551616", b"99999999999999999999",
    b"000000000000000000001", b"-1", b"1 ", b"",
)  # fmt: skip


def counts(delta: int, initial: int, expiry: int) -> bytes:
    return struct.pack(">QQI", delta, initial, expiry)


def with_own_cas(node: MemoryNode, packet: bytes, *, is_plain: bool) -> bytes:
    """Return a request with the CAS that its document has."""
    vb_id, key_at = int.from_bytes(packet[6:8], "big"), 24 + packet[4]
    key = packet[key_at : key_at + int.from_bytes(packet[2:4], "big")]
    meta = node.engine.newest_meta(vb_id % PARTITIONS, b"\0" + key if is_plain else key)
    return packet[:16] + (0 if meta is None else meta.cas).to_bytes(8, "big") + packet[24:]


def a_request(kind: str, vb_id: int, key: bytes, value_bytes: int, opaque: int) -> bytes:
    parts: dict[str, Any] = {
        "vb_id": vb_id, "key": key, "value": b"v" * value_bytes, "extras": bytes(8),
    }  # fmt: skip
    changed: dict[str, tuple[int, dict[str, Any]]] = {
        "flags": (Opcode.SET, {"extras": b"\xde\xad\xbe\xef" + bytes(4)}),
        "json": (Opcode.SET, {"datatype": 1}),
        "snappy": (Opcode.SET, {"datatype": 2, "value": b"\x02\x04ab"}),
        "xattr": (Opcode.SET, {"datatype": 4}),
        "expiry": (Opcode.SET, {"extras": bytes(7) + b"\x09"}),
        "30 days": (Opcode.SET, {"extras": bytes(4) + (30 * 86_400).to_bytes(4, "big")}),
        "over 30 days": (Opcode.SET, {"extras": bytes(4) + (30 * 86_400 + 1).to_bytes(4, "big")}),
        "late": (Opcode.SETQ, {"extras": b"\0\0\0\1" + b"\xff" * 4}),
        "cas": (Opcode.SET, {"cas": 77}),
        "setq": (Opcode.SETQ, {}),
        "add": (Opcode.ADD, {}),
        "get": (Opcode.GET, {"extras": b"", "value": b""}),
        "delete": (Opcode.DELETE, {"extras": b"", "value": b""}),
        "deleteq": (Opcode.DELETEQ, {"extras": b"", "value": b""}),
        "delete cas": (Opcode.DELETE, {"extras": b"", "value": b"", "cas": 77}),
        "delete extras": (Opcode.DELETE, {"value": b""}),
        "addq": (Opcode.ADDQ, {}),
        "add cas": (Opcode.ADD, {"cas": 77}),
        "add expiry": (Opcode.ADD, {"extras": bytes(7) + b"\x09"}),
        "replace": (Opcode.REPLACE, {}),
        "replaceq": (Opcode.REPLACEQ, {}),
        "number": (Opcode.SET, {"value": NUMBER_TEXTS[value_bytes % len(NUMBER_TEXTS)]}),
        "incr value": (Opcode.INCREMENT, {"extras": counts(1, 1, 0)}),
        **{
            name: (opcode, {"extras": counts(*numbers), "value": b"", "cas": cas})
            for name, opcode, numbers, cas in (
                ("incr", Opcode.INCREMENT, (value_bytes, 7, 0), 0),
                ("incrq", Opcode.INCREMENTQ, (1 << 63, (1 << 64) - 1, 0), 0),
                ("decr", Opcode.DECREMENT, (value_bytes, 100, 0), 0),
                ("decrq", Opcode.DECREMENTQ, ((1 << 64) - 1, 0, 0), 0),
                ("incr only", Opcode.INCREMENT, (1, 1, 0xFFFF_FFFF), 0),
                ("incr expiry", Opcode.INCREMENT, (1, 1, 5), 0),
                ("incr cas", Opcode.INCREMENT, (1, 1, 0), 77),
            )
        },
        "touch": (Opcode.TOUCH, {"extras": value_bytes.to_bytes(4, "big"), "value": b"", "cas": 7}),
        "gat": (Opcode.GAT, {"extras": value_bytes.to_bytes(4, "big"), "value": b"", "cas": 7}),
        "gatq": (Opcode.GATQ, {"extras": value_bytes.to_bytes(4, "big"), "value": b""}),
        "gat value": (Opcode.GAT, {"extras": bytes(4)}),
        "append": (Opcode.APPEND, {"extras": b"", "value": b"7" * value_bytes}),
        "appendq": (Opcode.APPENDQ, {"extras": b""}),
        "prepend": (Opcode.PREPEND, {"extras": b"", "value": b"1" * value_bytes}),
        "prependq": (Opcode.PREPENDQ, {"extras": b""}),
        "append cas": (Opcode.APPEND, {"extras": b"", "cas": 77}),
        "append extras": (Opcode.APPEND, {}),
        "append json": (Opcode.APPEND, {"extras": b"", "value": b"1", "datatype": 1}),
        "touch 0": (Opcode.TOUCH, {"extras": bytes(4), "value": b""}),
        "touch value": (Opcode.TOUCH, {"extras": bytes(4)}),
        "collection": (Opcode.SET, {"key": b"\x09k"}),
        "no key": (Opcode.SET, {"key": b""}),
        "empty key": (Opcode.SET, {"key": b"\0"}),
        "long key": (Opcode.SET, {"key": b"\0" + b"k" * 251}),
        "no extras": (Opcode.SET, {"extras": b""}),
        "few extras": (Opcode.SET, {"extras": bytes(4)}),
        "nowhere": (Opcode.SET, {"vb_id": 1024}),
        "noop": (Opcode.NOOP, {"extras": b"", "key": b"", "value": b""}),
    }
    opcode, others = changed.get(kind.removeprefix("own cas").strip(), (Opcode.SET, {}))
    packet = pack_request(opcode, opaque=opaque, **(parts | others))
    if kind == "key beyond":
        packet = packet[:2] + (len(packet) - 31).to_bytes(2, "big") + packet[4:]
    return packet


def facts(node: MemoryNode) -> list[Any]:
    """Everything that a SET may touch, the order of dictionaries included."""
    engine, keyspace = node.engine, node.engine.keyspace
    found: list[Any] = [
        (
            [getattr(part, name) for name in NUMBERS],
            [(list(layer.newest.items()), layer.entries) for layer in part.layers()],
            [list(part.recent.items()), list(part.older.items())],
            part.tally.to_document(),
        )
        for part in node.engine.partitions
    ]
    cache = engine.item_cache
    found += [(layer._buckets, layer._seconds, layer.held) for layer in engine.due.layers()]
    found.append((cache.hits, cache.misses, cache.taken, cache.held_bytes))
    found.append((keyspace.pending, [part.vb_id for part in keyspace.touched], keyspace.group))
    found.append(
        (
            keyspace.memtables.active_bytes,
            keyspace.memtables.frozen_bytes,
            keyspace.broken_invariant(),
        )
    )
    found.append([node.device.read(segment) for segment in node.device.segments()])
    return found


def heard(peer: Peer) -> list[Any]:
    """What a session has left for the shell, answers included."""
    state = peer.state
    found: list[Any] = [
        list(state.answers), state.wait_group, state.first_change, state.awaited, state.notes.lines,
        state.is_full, state.taken_bytes, state.buffer, state.close_reason,
    ]  # fmt: skip
    for mark in state.marks or ():  # a run has one mark, requests of their own have one each
        of_each = 1 if mark.is_run else mark.answers
        found += [
            (state.answers[mark.first_answer + at][1] if mark.is_run else mark.opcode,
             mark.first_answer + at, mark.first_entry + at, mark.is_read,
             of_each, 1 if mark.is_run else mark.entries, mark.observed)
            for at in range(mark.answers if mark.is_run else 1)
        ]  # fmt: skip
    return found


class Pair:
    """The same node and client twice; the second one's loop is Python."""

    def __init__(
        self,
        kind: type[MemoryNode],
        *,
        item_cache_bytes: int = 0,
        has_marks: bool = False,
        form: str = "all",
    ) -> None:
        self.nodes = [kind(partitions=PARTITIONS, item_cache_bytes=item_cache_bytes) for _ in "12"]
        assert self.nodes[0].engine.set_run is not None
        self.nodes[1].engine.set_run = None
        self.features = FORMS[form]
        self.peers = [self._connected(node, has_marks=has_marks) for node in self.nodes]

    def _connected(self, node: MemoryNode, *, has_marks: bool) -> Peer:
        peer = node.connect(limits=Limits(value_bytes_max=VALUE_BYTES_MAX))
        if self.features is not None:
            peer.hello(*self.features)
        if has_marks:
            peer.state.marks = []
        return peer

    def send(self, data: bytes) -> list[Any]:
        """Send bytes to both; return what the first one left."""
        first, second = (self._sent(peer, data) for peer in self.peers)
        assert first == second
        self.check()
        return first

    def _sent(self, peer: Peer, data: bytes) -> list[Any]:
        peer.session.receive(data, peer.node.now_ns)
        left = heard(peer)
        peer.state.answers.clear()
        peer.state.notes.lines.clear()
        if peer.state.marks is not None:
            peer.state.marks = []
        return left

    def check(self) -> None:
        assert facts(self.nodes[0]) == facts(self.nodes[1])

    def close(self) -> None:
        for node in self.nodes:
            if isinstance(node, LmdbNode):
                node.close()


class TwinMachine(RuleBasedStateMachine):
    """See the module."""

    pair: Pair
    kind: type[MemoryNode] = MemoryNode

    @initialize(
        item_cache_bytes=st.sampled_from((0, 900, 1 << 20)),
        has_marks=st.booleans(),
        form=st.sampled_from([*FORMS, "all", "all"]),
    )
    def begin(self, *, item_cache_bytes: int, has_marks: bool, form: str) -> None:
        self.pair = Pair(
            self.kind, item_cache_bytes=item_cache_bytes, has_marks=has_marks, form=form
        )

    @rule(commands=COMMANDS, cut=st.integers(0, 400))
    def send(self, commands: list[tuple[str, int, bytes, int]], cut: int) -> None:
        requests = [a_request(*command, n) for n, command in enumerate(commands)]
        node, is_plain = self.pair.nodes[0], not self.pair.peers[0].state.hello.has_collections
        packets = b"".join(
            with_own_cas(node, request, is_plain=is_plain) if kind.startswith("own") else request
            for (kind, *_), request in zip(commands, requests, strict=True)
        )
        for piece in (packets[:cut], packets[cut:]):
            if piece:
                self.pair.send(piece)

    @rule(vb_id=st.integers(0, PARTITIONS - 1), key=st.sampled_from(KEYS))
    def put_xattrs(self, vb_id: int, key: bytes) -> None:
        """They stay when a SET follows."""
        value = pack_xattrs([(b"_sync", b"{}"), (b"mine", b"1")]) + b"body"
        if not self.pair.peers[0].state.hello.has_collections:
            key = b"\0" + key[:-1]
        for node in self.pair.nodes:
            part = node.engine.partitions[vb_id]
            node.engine.put(part, key, key + value, 0, 0, DATATYPE_XATTR, keeps_xattrs=False)

    @rule(past_ns=st.integers(0, 1 << 20) | st.just(6 * 10**9))
    def pass_time(self, past_ns: int) -> None:
        for node in self.pair.nodes:
            node.now_ns += past_ns

    @rule(vb_id=st.integers(0, PARTITIONS - 1), ahead=st.sampled_from((0, 1 << 40)))
    def raise_cas(self, vb_id: int, ahead: int) -> None:
        for node in self.pair.nodes:
            node.engine.partitions[vb_id].max_cas += ahead

    @rule(vb_id=st.integers(0, PARTITIONS - 1), is_held=st.booleans())
    def hold(self, vb_id: int, *, is_held: bool) -> None:
        for node in self.pair.nodes:
            part = node.engine.partitions[vb_id]
            if is_held:
                part.hold_writes(Hold.QUARANTINE, "a test")
            else:
                part.release_writes(Hold.QUARANTINE)

    @rule(vb_id=st.integers(0, PARTITIONS - 1), state=st.sampled_from((*[VbState.ACTIVE] * 3, 2)))
    def change_state(self, vb_id: int, state: int) -> None:
        for node in self.pair.nodes:
            node.engine.partitions[vb_id].state = VbState(state)

    @rule(vb_id=st.integers(0, PARTITIONS - 1), share=st.floats(0, 1))
    def branch(self, vb_id: int, share: float) -> None:
        for node in self.pair.nodes:
            part = node.engine.partitions[vb_id]
            node.engine.keyspace.branch(vb_id, int(part.high_seqno * share))

    @rule()
    def commit(self) -> None:
        for node in self.pair.nodes:
            node.commit()
        self.pair.check()

    def _is_merging(self) -> bool:
        return self.pair.nodes[0].engine.keyspace.memtables.is_merging

    @precondition(lambda self: not self._is_merging())
    @rule()
    def begin_merge(self) -> None:
        for node in self.pair.nodes:
            node.begin_merge()

    @precondition(_is_merging)
    @rule()
    def end_merge(self) -> None:
        for node in self.pair.nodes:
            node.end_merge()
        self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.close()


EXAMPLES = int(os.environ.get("DCPD_EXAMPLES", "20"))


class LmdbTwinMachine(TwinMachine):
    """The same over LMDB."""

    kind = LmdbNode


TestTwins = TwinMachine.TestCase
TestTwins.settings = settings(max_examples=EXAMPLES, stateful_step_count=20)
TestLmdbTwins = LmdbTwinMachine.TestCase
TestLmdbTwins.settings = settings(max_examples=max(1, EXAMPLES // 4), stateful_step_count=15)


PREPARED = ("set", "number", "delete", "expiry", "")
LOOP_KINDS = (
    "add", "addq", "replace", "replaceq", "delete", "deleteq", "own cas", "own cas delete", "cas",
    "delete cas", "add cas", "incr", "incrq", "decr", "decrq", "incr only", "incr expiry",
    "incr cas", "own cas incr", "touch", "touch 0", "append", "appendq", "prepend", "prependq",
    "own cas append", "append cas", "gat", "gatq",
)  # fmt: skip


@pytest.mark.parametrize("kind", [MemoryNode, LmdbNode])
@pytest.mark.parametrize("form", ["all", "no hello"])
def test_each_kind_over_each_old_version(kind: type[MemoryNode], form: str) -> None:
    """Documents, numbers, deletions, due documents and nothing, each in the active layer, in the
    frozen one, in the item cache and in the store; each request twice in a run.
    """
    pair = Pair(kind, item_cache_bytes=1 << 20, form=form)
    is_plain = not pair.peers[0].state.hello.has_collections

    def requests(kind: str, keys: list[bytes]) -> bytes:
        made = (a_request(kind, 1, key[is_plain:], 5, n) for n, key in enumerate(keys))
        if kind.startswith("own"):
            made = (with_own_cas(pair.nodes[0], each, is_plain=is_plain) for each in made)
        return b"".join(made)

    def prepare(place: str) -> dict[str, list[bytes]]:
        keys = {
            what: [b"\0%b %b %b" % (place.encode(), what.encode(), each.encode())
                   for each in LOOP_KINDS]
            for what in PREPARED
        }  # fmt: skip
        for what in filter(None, PREPARED):
            for before in ("set", what):
                pair.send(requests(before, keys[what]))
        return keys

    prepared = [prepare("stored")]
    for node in pair.nodes:
        node.merge()
        for part in node.engine.partitions:
            node.engine.item_cache.clear(part)
    prepared.append(prepare("cached"))
    for node in pair.nodes:
        node.merge()
    prepared.append(prepare("frozen"))
    for node in pair.nodes:
        node.begin_merge()
    prepared.append(prepare("active"))
    for node in pair.nodes:
        node.now_ns += 60 * 10**9
    for at, each in enumerate(LOOP_KINDS):
        keys = [made[what][at] for made in prepared for what in PREPARED]
        pair.send(2 * requests(each, keys))
    for node in pair.nodes:
        node.end_merge()
    pair.check()
    pair.close()


def test_each_kind_is_taken_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python carries out none of these, and refuses none."""
    pair = Pair(MemoryNode)
    keys = [b"\0key %d" % number for number in range(70)]
    pair.send(b"".join(a_request("number", 1, key, 1, 0) for key in keys))
    handled = list[int]()
    take = pair.peers[0].session._take
    monkeypatch.setattr(
        pair.peers[0].session, "_take", lambda *args: (handled.append(args[1]), take(*args))
    )
    for name in ("store", "delete"):
        done = getattr(pair.nodes[0].engine, name)

        def counted(*args: Any, done: Any = done) -> Any:
            handled.append(-1)
            return done(*args)

        monkeypatch.setattr(pair.nodes[0].engine, name, counted)
    pair.nodes[0].commit()
    pair.nodes[1].commit()
    for each in ("incr", "touch", "cas", "add", "replaceq", "append", "prependq", "gat", "number",
                 "decrq", "gatq", "own cas append", "appendq", "prepend", "append cas",
                 "own cas delete", "deleteq", "replace", "incr only", "addq",
                 "delete cas"):  # fmt: skip
        made = [a_request(each, 1, key, 1, n) for n, key in enumerate(keys)]
        if each.startswith("own"):
            made = [with_own_cas(pair.nodes[0], request, is_plain=False) for request in made]
        pair.send(b"".join(made))
    assert handled == []


def test_values_made_of_present_ones_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of TOUCHes, which write whole documents, lets others take their turn."""
    monkeypatch.setattr("dcp.session.kv.runs.CHANGES_BYTES_MAX", 1_000)
    pair = Pair(MemoryNode)
    peer = pair.peers[0]
    keys = [b"\0key %d" % number for number in range(70)]
    pair.send(b"".join(a_request("set", 1, key, 100, 0) for key in keys))
    touches = b"".join(a_request("touch", 1, key, 9, n) for n, key in enumerate(keys))
    peer.session.receive(touches, peer.node.now_ns)
    entry = peer.node.engine.keyspace.pending[-1]
    assert peer.state.is_full
    assert len(peer.state.answers) == 1_000 // len(entry) + 1


def plain(key: bytes, opaque: int = 0, vb_id: int = 1) -> bytes:
    return a_request("set", vb_id, key, 3, opaque)


@pytest.mark.parametrize("kind", [MemoryNode, LmdbNode])
@pytest.mark.parametrize("item_cache_bytes", [0, 1 << 20])
def test_each_place_of_an_old_version(kind: type[MemoryNode], item_cache_bytes: int) -> None:
    """Documents and deletions in the store, in the cache, in both layers, and nowhere; each key
    twice in a run.
    """
    pair = Pair(kind, item_cache_bytes=item_cache_bytes)

    def send(kind: str, keys: Iterable[bytes], vb_ids: Iterable[int] = (1, 2)) -> None:
        requests = [a_request(kind, vb_id, key, 5, 0) for key in keys for vb_id in vb_ids]
        pair.send(b"".join(requests))

    for _ in range(2):
        send("set", KEYS[:8])
        send("delete", KEYS[:2])
        for node in pair.nodes:
            node.merge()
        send("get", KEYS[2:5])
        send("set", KEYS[4:6])
        send("delete", KEYS[6:7])
        for node in pair.nodes:
            node.begin_merge()
        send("set", KEYS[7:9])
        send("delete", KEYS[4:5])
        before = pair.nodes[0].engine.item_cache.taken
        send("set", KEYS * 2, (1, 3))
        taken = pair.nodes[0].engine.item_cache.taken - before
        assert (taken > 0) == bool(item_cache_bytes)
        for node in pair.nodes:
            node.end_merge()
        pair.check()
    pair.close()


@pytest.mark.parametrize("form", FORMS)
def test_every_client_s_plain_sets_are_taken_by_the_loop(form: str) -> None:
    """With and without collections, tokens and HELLO, quiet ones too; the answers are the same."""
    pair = Pair(MemoryNode, form=form)
    handled = list[int]()
    store = Engine.store
    engine = pair.nodes[0].engine

    def counted(*args: Any, **kwargs: Any) -> Any:
        handled.append(1)
        return store(engine, *args, **kwargs)

    engine.store = counted  # type: ignore[method-assign]
    keys = [b"\0key %d" % number for number in range(40)]
    requests = b"".join(plain(key, n) for n, key in enumerate(keys))
    quiet = b"".join(a_request("setq", 1, key, 5, n) for n, key in enumerate(keys))
    noop = a_request("noop", 0, b"", 0, 99)
    assert len(pair.send(requests)[0]) == len(keys)
    pair.send(quiet)
    pair.send(requests + quiet + noop)
    for node in pair.nodes:
        node.merge()
    pair.send(quiet + requests)
    pair.send(b"".join(a_request("expiry", 1, key, 5, n) for n, key in enumerate(keys)))
    assert handled == []


def test_old_records_are_found_in_pages() -> None:
    """Python looks up none of them."""
    pair = Pair(LmdbNode)
    keys = [b"\0key %d" % number for number in range(300)]
    packets = b"".join(plain(key) for key in keys)
    pair.send(packets)
    for node in pair.nodes:
        node.merge()
    engine, asked = pair.nodes[0].engine, list[bytes]()

    def meta_below(part: Partition, key: bytes, entry: bytes | None) -> Meta:
        asked.append(key)
        return engine.versions.meta_below(part, key, entry)

    engine.set_run = set_run(
        engine.partitions, meta_below, pair.nodes[0].store.key_tree, engine.item_cache,
        StoreDamagedError,
    )  # fmt: skip
    pair.send(packets + plain(b"\0new"))
    assert asked == []
    assert engine.partitions[1].item_count == 301
    pair.close()


def test_a_run_takes_all_that_it_may() -> None:
    """Up to the first request that is for Python, and then up to the next one."""
    pair = Pair(MemoryNode)
    engine, taken = pair.nodes[0].engine, list[tuple[int, int]]()

    class Recorded:
        def __init__(self, run: SetRun) -> None:
            self.run = run

        def apply(self, received: bytes, position: int, *rest: Any) -> tuple[int, int]:
            after, made_bytes = self.run.apply(received, position, *rest)
            taken.append((position, after))
            return after, made_bytes

    assert engine.set_run is not None
    engine.set_run = cast("SetRun", Recorded(engine.set_run))
    sets = b"".join(plain(key) for key in KEYS * 20)
    other = a_request("snappy", 1, KEYS[0], 3, 0)
    pair.send(sets + other + sets)
    again = len(sets) + len(other)
    assert taken == [
        (0, len(sets)), (len(sets), len(sets)), (again, again + len(sets)),
    ]  # fmt: skip


NO_MEMORY = """
import _testcapi, struct, sys
from dcp.session.node_facts import Limits
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode

keys = [b"\\0key%06d" % number for number in range(6)]
sets = [
    pack_request(Opcode.SET, vb_id=1 + n % 2, key=key, value=b"v" * 700, extras=bytes(8))
    for n, key in enumerate(keys)
]
others = [
    pack_request(opcode, vb_id=1 + n % 2, key=keys[n], extras=extras)
    for opcode, n, extras in (
        (Opcode.TOUCH, 0, bytes(3) + b"\\5"), (Opcode.DELETE, 1, b""), (Opcode.ADD, 2, bytes(8)),
        (Opcode.INCREMENT, 1, bytes(20)), (Opcode.INCREMENT, 1, bytes(7) + b"\\1" + bytes(12)),
        (Opcode.DELETEQ, 1, b""), (Opcode.REPLACE, 1, bytes(8)), (Opcode.ADDQ, 1, bytes(8)),
        (Opcode.APPEND, 0, b""), (Opcode.PREPENDQ, 3, b""), (Opcode.GAT, 3, bytes(3) + b"\\5"),
    )
]
data = b"".join(sets + others)

def attempt(cache_bytes, fail_at):
    node = MemoryNode(partitions=4, item_cache_bytes=cache_bytes)
    peer = node.connect(limits=Limits(value_bytes_max=1 << 20))
    peer.hello(Feature.COLLECTIONS, Feature.XERROR, Feature.MUTATION_SEQNO)
    peer.session.receive(b"".join(sets[:3]), node.now_ns)
    node.merge()
    engine, keyspace, answers = node.engine, node.engine.keyspace, []
    before = [part.high_seqno for part in engine.partitions]
    apply, failed = engine.set_run.apply, False
    arguments = (
        data, 0, len(data), answers, keyspace.pending, keyspace.touched, keyspace.group,
        engine.now_ns, 0, 1 << 20, 12, 0, [], 1 << 20, [], bytes(24), bytes(24),
    )
    _testcapi.set_nomemory(fail_at, fail_at + 1)
    try:
        apply(*arguments)
    except MemoryError:
        failed = True
    finally:
        _testcapi.remove_mem_hooks()
    parts = engine.partitions
    held = sum(part.recent_bytes + part.older_bytes for part in parts)
    assert engine.item_cache.held_bytes == held, (fail_at, "held_bytes")
    if keyspace.broken_invariant():
        return failed
    for part, high_seqno in zip(parts, before):
        if part.high_seqno != high_seqno:
            cas = struct.unpack_from(">Q", part.active.entries[-1], 28)[0]
            assert part.max_cas >= cas, (fail_at, "max_cas")
            assert part in keyspace.touched, (fail_at, "touched")
    present = {(1 + n % 2, key) for n, key in enumerate(keys[:3])}
    for part in parts:
        present -= {(part.vb_id, key) for key in part.newest}
        present |= {(part.vb_id, key) for key, entry in part.newest.items() if entry[13] == 0x57}
    assert sum(part.item_count for part in parts) == len(present), (fail_at, "item_count")
    return failed

for cache_bytes in (0, 1 << 20):
    assert sum(attempt(cache_bytes, fail_at) for fail_at in range(200)) > 60
"""


def test_change_without_memory_is_noticed_or_has_not_happened() -> None:
    """One allocation after the other fails. In a process of its own, whose memory it is."""
    pytest.importorskip("_testcapi")
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root), str(root / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def damage(node: MemoryNode, full_key: bytes) -> None:
    """Flip a bit of a record of by_key, wherever its page was written, and adapt its checksum:
    only the record's own tells.
    """
    if not isinstance(node, LmdbNode):
        node.env.flip(BY_KEY_TABLE, full_key, 12)  # type: ignore[attr-defined]
    else:
        with (Path(node._folder.name) / "store" / "data.mdb").open("r+b") as file:
            data = file.read()
            found = [match.end() for match in re.finditer(re.escape(full_key + b"W"), data)]
            assert found
            for at in found:
                file.seek(at + 11)
                file.write(bytes([data[at + 11] ^ 1]))
        with (Path(node._folder.name) / "store" / SUMS_FILE_NAME).open("r+b") as sums:
            damaged = (Path(node._folder.name) / "store" / "data.mdb").read_bytes()
            for number in {(at + 11) // 4096 for at in found}:
                page = damaged[number * 4096 : (number + 1) * 4096]
                sums.seek(4 * (ENTRIES_AT + number))
                sums.write(google_crc32c.value(page).to_bytes(4, sys.byteorder))
    node.store.refresh()


@pytest.mark.parametrize("kind", [MemoryNode, LmdbNode])
def test_a_damaged_record_fails_only_its_request(kind: type[MemoryNode]) -> None:
    pair = Pair(kind)
    pair.send(b"".join(plain(key) for key in KEYS))
    for node in pair.nodes:
        node.merge()
        damage(node, b"\0\1" + KEYS[3])
    answers, *_ = pair.send(b"".join(plain(key, n) for n, key in enumerate(KEYS)))
    assert [answer[6:8] != b"\0\0" for answer in answers] == [key == KEYS[3] for key in KEYS]
    pair.close()


@settings(max_examples=100)
@given(
    head=st.binary(min_size=24, max_size=40) | st.just(plain(KEYS[0])),
    changes=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 255)), max_size=4),
    end=st.integers(0, 120),
)
def test_crafted_bytes(head: bytes, changes: list[tuple[int, int]], end: int) -> None:
    """Whatever the bytes are, both do the same, and nothing else happens."""
    data = bytearray(head + plain(KEYS[1]) + plain(KEYS[2]))
    for at, byte in changes:
        data[at % len(head)] = byte
    pair = Pair(MemoryNode)
    for peer in pair.peers:
        peer.session.receive(bytes(data[:end]), peer.node.now_ns)
    assert heard(pair.peers[0]) == heard(pair.peers[1])
    pair.check()


OTHERS: tuple[int, list[int], bytes, bytes] = (1, [], bytes(24), bytes(24))
"""Room, partitions that are observed, and answers of refusals."""


@pytest.mark.parametrize(("begin", "end"), [(-1, 10), (5, 4), (0, 1 << 40), (1 << 70, 1 << 70)])
def test_borders_outside_of_the_bytes_are_refused(begin: int, end: int) -> None:
    node = MemoryNode(partitions=1)
    run = node.engine.set_run
    assert run is not None
    with pytest.raises((ValueError, OverflowError)):
        run.apply(plain(KEYS[0]), begin, end, [], [], [], 1, 0, 0, 100, 4, 0, [], *OTHERS)
    assert node.engine.partitions[0].high_seqno == 0


@pytest.mark.parametrize("error", [MemoryError, StoreDamagedError])
def test_errors_of_the_store_that_are_not_damage_are_raised(error: type[Exception]) -> None:
    node = MemoryNode(partitions=1)
    node.engine.partitions[0].merged_seqno = 1

    def tree() -> None:
        raise error("a test")

    run = set_run(
        node.engine.partitions,
        node.engine.versions.meta_below,
        tree,
        node.engine.item_cache,
        StoreDamagedError,
    )
    assert run is not None
    request = plain(KEYS[0], vb_id=0)
    arguments = (request, 0, len(request), [], [], [], 1, 0, 0, 100, 4, 0, [], *OTHERS)
    if error is StoreDamagedError:
        assert run.apply(*arguments)[0] == len(request), "Python has looked the key up"
    else:
        with pytest.raises(MemoryError):
            run.apply(*arguments)
    assert node.engine.partitions[0].high_seqno == (error is StoreDamagedError)


def test_a_class_without_slots_is_refused() -> None:
    with pytest.raises((TypeError, AttributeError)):
        set_run([object()], lambda *_: (0,) * 7, lambda: None, None, StoreDamagedError)
