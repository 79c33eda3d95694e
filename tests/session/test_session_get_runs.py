"""GETs that come together, which the loop in C answers, get the answers of GETs that come one by
one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.state import ANSWER_BYTES_MAX
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import DATATYPE_XATTR, pack_xattrs
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState
from vbucket.model.datatype import SNAPPY, compressed
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.native import get_run, new_staged
from vbucket.store.environment import StoreDamagedError
from vbucket.store.records import BY_KEY_TABLE

VB = 3
REPLICA_VB = 4
DAY_S = 86_400
KEYS = [
    b"\0merged", b"\0changed", b"\0deleted", b"\0expired", b"\0later", b"\0new", b"\0gone",
    b"\0json", b"\0missing", b"\0damaged",
]  # fmt: skip


def node_of_all_kinds(partitions: int = 8) -> MemoryNode:
    """Documents in the store, in both layers, in the cache, and such as are no more."""
    node = MemoryNode(partitions=partitions, item_cache_bytes=1 << 20)
    peer = connected(node)
    for key in [*KEYS[:5], b"\0json", b"\0damaged"]:
        expiry = {b"\0expired": DAY_S, b"\0later": 9 * DAY_S}.get(key, 0)
        put(peer, key, b"old " + key, expiry=expiry, datatype=key == b"\0json")
    node.merge()
    part = node.engine.partitions[VB]
    node.engine.item_cache.clear(part)
    for key in (b"\0merged", b"\0expired"):
        assert peer.ask(Opcode.GET, vb_id=VB, key=key).status == 0
    for key in (b"\0changed", b"\0gone"):
        put(peer, key, b"frozen")
    peer.delete(VB, b"\0deleted")
    node.begin_merge()
    peer.delete(VB, b"\0gone")
    put(peer, b"\0new", b"")
    node.commit()
    node.env.flip(BY_KEY_TABLE, VB.to_bytes(2, "big") + b"\0damaged", 3)  # type: ignore[attr-defined]
    node.store.refresh()
    node.engine.partitions[REPLICA_VB].state = VbState.REPLICA
    node.now_ns += 2 * DAY_S * 1_000_000_000
    return node


def connected(node: MemoryNode, *, with_tokens: bool = True) -> Peer:
    peer = node.connect()
    features = [Feature.COLLECTIONS, Feature.XERROR, Feature.JSON]
    peer.hello(*features, *([Feature.MUTATION_SEQNO] if with_tokens else []))
    return peer


def put(peer: Peer, key: bytes, value: bytes, *, expiry: int = 0, datatype: int = 0) -> None:
    extras = bytes(4) + expiry.to_bytes(4, "big")
    request = {"key": key, "value": value, "extras": extras, "datatype": datatype}
    assert peer.ask(Opcode.SET, vb_id=VB, **request).status == 0  # type: ignore[arg-type]


def a_request(kind: str, key: bytes, opaque: int) -> bytes:
    if kind == "get":
        return pack_request(Opcode.GET, vb_id=VB, key=key, opaque=opaque)
    others: dict[str, tuple[int, dict[str, int | bytes]]] = {
        "getk": (Opcode.GETK, {"key": key}),
        "getq": (Opcode.GETQ, {"key": key}),
        "getkq": (Opcode.GETKQ, {"key": key}),
        "extras": (Opcode.GET, {"key": key, "extras": b"1234"}),
        "value": (Opcode.GET, {"key": key, "value": b"x"}),
        "nothing": (Opcode.GET, {}),
        "no key": (Opcode.GET, {"key": b"\0"}),
        "long key": (Opcode.GET, {"key": b"\0" + b"k" * 251}),
        "collection": (Opcode.GET, {"key": b"\x09k"}),
        "datatype": (Opcode.GET, {"key": key, "datatype": 1}),
        "elsewhere": (Opcode.GET, {"key": key, "vb_id": REPLICA_VB}),
        "nowhere": (Opcode.GET, {"key": key, "vb_id": 1024}),
        "set": (Opcode.SET, {"key": key, "value": b"set", "extras": bytes(8)}),
        "noop": (Opcode.NOOP, {}),
    }
    opcode, parts = others[kind]
    return pack_request(opcode, opaque=opaque, **({"vb_id": VB} | parts))  # type: ignore[arg-type]


REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["get"] * 14)
        | st.sampled_from(
            ["getk", "getq", "getkq", "extras", "value", "nothing", "no key", "long key",
             "collection", "datatype", "elsewhere", "nowhere", "set", "noop"]
        ),
        st.sampled_from(KEYS),
    ),
    min_size=1,
    max_size=30,
)  # fmt: skip


@settings(max_examples=25)
@given(kinds=REQUESTS, with_tokens=st.booleans(), cut=st.integers(0, 40))
def test_together_as_one_by_one(
    kinds: list[tuple[str, bytes]], with_tokens: bool, cut: int
) -> None:
    requests = [a_request(kind, key, n) for n, (kind, key) in enumerate(kinds)]
    single = connected(node_of_all_kinds(), with_tokens=with_tokens)
    expected = [frame for request in requests for frame in single.send(request)]
    peer = connected(node_of_all_kinds(), with_tokens=with_tokens)
    data = b"".join(requests)
    end = max(0, len(data) - cut)
    assert [*peer.send(data[:end]), *peer.send(data[end:])] == expected
    assert peer.state.wait_group == single.state.wait_group
    high_seqnos = [p.node.engine.partitions[VB].high_seqno for p in (peer, single)]
    assert high_seqnos[0] == high_seqnos[1]


def test_reads_together_count_as_reads_one_by_one() -> None:
    """Documents, deletions and expired ones in the cache, ones in the store, and a damaged one."""
    counts = []
    for are_together in (True, False):
        node = node_of_all_kinds()
        node.end_merge()
        peer = connected(node)
        cache = node.engine.item_cache
        cache.hits = cache.misses = 0
        keys = [b"\0later", *KEYS]
        requests = [a_request("get", key, n) for n, key in enumerate(keys)]
        for data in [b"".join(requests)] if are_together else requests:
            peer.send(data)
        assert cache.hits + cache.misses == len(keys) - 2, "two are not merged yet"
        counts.append((cache.hits, cache.misses))
    assert counts[0] == counts[1]


def test_a_run_stops_where_the_answers_are_enough() -> None:
    node = MemoryNode(item_cache_bytes=1 << 20)
    peer = connected(node)
    put(peer, b"\0a", bytes(ANSWER_BYTES_MAX * 2 // 5))
    peer.session.receive(pack_request(Opcode.GET, vb_id=VB, key=b"\0a") * 10, node.now_ns)
    assert peer.state.is_full
    assert len(peer.state.answers) == 3
    frames = peer.send(b"")
    while peer.state.buffer:
        peer.session.resume(node.now_ns)
        frames += peer.send(b"")
    assert len(frames) == 10


def test_answers_of_a_run_wait_for_what_they_show() -> None:
    node = MemoryNode(item_cache_bytes=1 << 20)
    peer = connected(node)
    put(peer, b"\0a", b"v")
    other = connected(node)
    frames = other.send(pack_request(Opcode.GET, vb_id=VB, key=b"\0a") * 3)
    assert [frame.value for frame in frames] == [b"v"] * 3
    assert other.must_wait
    node.commit()
    assert not other.must_wait


def test_each_of_a_run_gets_its_own_status() -> None:
    node = node_of_all_kinds(NUM_VBUCKETS)
    peer = connected(node)
    frames = peer.send(b"".join(a_request("get", key, n) for n, key in enumerate(KEYS)))
    statuses = {key: frame.status for key, frame in zip(KEYS, frames, strict=True)}
    assert statuses[b"\0damaged"] == Status.EINTERNAL
    assert statuses[b"\0json"] == statuses[b"\0new"] == statuses[b"\0merged"] == Status.OK
    assert statuses[b"\0expired"] == statuses[b"\0gone"] == Status.KEY_ENOENT


# -- the loop in C and the handler ----------------------------------------------------------------

with_loops = pytest.mark.skipif(
    new_staged() is None, reason="the loops in C are not built (scripts/compile)"
)
MORE_KEYS = [*KEYS, b"\0xattr", b"\0packed", b"\0" + b"k" * 250]


def pair_of_all_kinds(*features: Feature, state: str) -> list[Peer]:
    """The same node and client twice; the second one has no loop."""
    peers = []
    for is_native in (True, False):
        node = node_of_all_kinds()
        assert node.engine.get_run is not None
        if not is_native:
            node.engine.get_run = None
        part = node.engine.partitions[VB]
        xattrs = pack_xattrs([(b"_sync", b"{}")]) + b"body"
        for key, value, datatype in (
            (b"\0xattr", xattrs, DATATYPE_XATTR),
            (b"\0packed", compressed(b"p" * 200), SNAPPY),
            (MORE_KEYS[-1], b"", 1),
        ):
            node.engine.put(part, key, key + value, 7, 0, datatype, keeps_xattrs=False)
        if state != "pending":
            node.commit()
        if state == "merged":
            node.end_merge()
            node.merge()
        peer = node.connect()
        peer.hello(Feature.COLLECTIONS, Feature.XERROR, *features)
        peers.append(peer)
    return peers


def heard(peer: Peer) -> list[Any]:
    """All that GETs touch."""
    state, engine, part = peer.state, peer.node.engine, peer.node.engine.partitions[VB]
    cache = engine.item_cache
    return [
        b"".join(state.answers), len(state.answers), state.unread_bytes, state.is_full,
        state.wait_group, state.awaited, state.taken_bytes, state.buffer, state.notes.lines,
        engine.gets, cache.hits, cache.misses, cache.held_bytes, part.high_seqno,
        list(part.recent.items()), list(part.older.items()),
    ]  # fmt: skip


@with_loops
@settings(max_examples=50)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from(
                ["get"] * 12
                + ["getq", "getk", "getkq"] * 3
                + ["extras", "elsewhere", "set", "no key"]
            ),
            st.sampled_from(MORE_KEYS),
        ),
        min_size=1,
        max_size=90,
    ),
    features=st.sets(st.sampled_from([Feature.JSON, Feature.SNAPPY, Feature.MUTATION_SEQNO])),
    state=st.sampled_from(["pending", "frozen", "merged"]),
)
def test_the_loop_in_c_answers_as_the_handler(
    kinds: list[tuple[str, bytes]], features: set[Feature], state: str
) -> None:
    data = b"".join(a_request(kind, key, n) for n, (kind, key) in enumerate(kinds))
    first, second = pair_of_all_kinds(*sorted(features), state=state)
    for peer in (first, second):
        peer.session.receive(data, peer.node.now_ns)
    assert heard(first) == heard(second)


PLAIN_KEYS = [b"key %d" % number for number in range(30)]
FORMS: list[tuple[Feature, ...] | None] = [
    (Feature.MUTATION_SEQNO,), (Feature.XERROR, Feature.JSON, Feature.SNAPPY), None,
]  # fmt: skip


@with_loops
@settings(max_examples=40)
@given(
    kinds=st.lists(
        st.tuples(
            st.sampled_from([Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ]),
            st.sampled_from([*PLAIN_KEYS, b"gone", b"k" * 250, b"k" * 251]),
        ),
        min_size=1,
        max_size=90,
    ),
    features=st.sampled_from(FORMS),
)
def test_clients_without_collections_are_answered_alike(
    kinds: list[tuple[int, bytes]], features: tuple[Feature, ...] | None
) -> None:
    """Without HELLO the partition follows from the key; a miss has memcached's text."""
    data = b"".join(
        pack_request(opcode, vb_id=VB, key=key, opaque=n) for n, (opcode, key) in enumerate(kinds)
    )
    peers = []
    for is_native in (True, False):
        node = MemoryNode(partitions=8, item_cache_bytes=1 << 20)
        if not is_native:
            node.engine.get_run = None
        peer = node.connect()
        if features is not None:
            peer.hello(*features)
        for number, key in enumerate([*PLAIN_KEYS, b"gone", b"k" * 250]):
            value = b'{"a":1}' if number % 3 else compressed(b"p" * 200)
            assert peer.ask(Opcode.SET, vb_id=VB, key=key, value=value, extras=bytes(8)).status == 0
            if number == 15:
                node.merge()
        peer.delete(VB, b"gone")
        node.commit()
        peers.append(peer)
    handled = list[bytes]()
    engine = peers[0].node.engine
    found = engine.document_entry
    engine.document_entry = lambda part, key: handled.append(key) or found(part, key)  # type: ignore[func-returns-value,method-assign]
    for peer in peers:
        peer.session.receive(data, peer.node.now_ns)
    assert heard(peers[0]) == heard(peers[1])
    assert handled == [], "a plain GET was left to Python"


@with_loops
@settings(max_examples=100)
@given(
    head=st.binary(min_size=24, max_size=40) | st.just(a_request("get", KEYS[0], 1)),
    changes=st.lists(st.tuples(st.integers(0, 39), st.integers(0, 255)), max_size=4),
    end=st.integers(0, 120),
)
def test_crafted_bytes(head: bytes, changes: list[tuple[int, int]], end: int) -> None:
    """Whatever the bytes are, both answer the same."""
    data = bytearray(head + a_request("get", KEYS[1], 2) + a_request("get", KEYS[5], 3))
    for at, byte in changes:
        data[at % len(head)] = byte
    peers = pair_of_all_kinds(state="frozen")
    for peer in peers:
        peer.session.receive(bytes(data[:end]), peer.node.now_ns)
    assert heard(peers[0]) == heard(peers[1])


@with_loops
def test_documents_in_memory_are_answered_in_one_piece() -> None:
    """Active layer, frozen layer and item cache: none of them is for Python."""
    node = MemoryNode(partitions=8, item_cache_bytes=1 << 20)
    peer = connected(node)
    keys = [b"\0key %d" % number for number in range(60)]
    for number, key in enumerate(keys):
        put(peer, key, b"v" * number)
        if number == 19:
            node.merge()
        elif number == 39:
            node.begin_merge()
    node.commit()
    assert node.engine.partitions[VB].frozen is not None
    requests = b"".join(a_request("get", key, n) for n, key in enumerate(keys))
    peer.send(requests)  # the window grows
    node.engine.item_cache.hits = 0
    peer.session.receive(requests, node.now_ns)
    pieces = [piece for piece in peer.state.answers if piece]
    assert (len(pieces), len(peer.state.answers)) == (1, 60)
    assert node.engine.item_cache.hits == 20
    assert [frame.value for frame in peer.send(b"")] == [b"v" * number for number in range(60)]


@with_loops
def test_entries_that_are_none_are_left_to_python() -> None:
    """What the caches hold is checked before it is read."""
    node = MemoryNode(partitions=4)
    part = node.engine.partitions[VB]
    sound = connected(node)
    put(sound, b"\0a", b"value")
    node.commit()
    entry = part.newest[b"\0a"]
    request = a_request("get", b"\0a", 1)
    run = node.engine.get_run
    assert run is not None
    arguments = (request, 0, len(request))
    kept = part.newest
    for wrong in (
        entry[:13], entry[:66], entry[:68], bytearray(entry), None, 5,
        entry[:14] + b"\0\7" + entry[16:], entry[:17] + b"\xff" + entry[18:],
    ):  # fmt: skip
        answers: list[bytes] = []
        kept[b"\0a"] = wrong  # type: ignore[assignment]
        assert run.answer(*arguments, answers, 0, 0, 9, 1 << 20, 0, b"") == (0, 0, 0, 0, 0), wrong
        assert answers == []
    kept[b"\0a"] = entry
    part.newest = []  # type: ignore[assignment]
    assert run.answer(*arguments, [], 0, 0, 9, 1 << 20, 0, b"")[1] == 0
    part.newest = kept
    assert run.answer(*arguments, [], 0, 0, 9, 1 << 20, 0, b"")[1] == 1
    assert run.answer(*arguments, [], 0, 0, 0, 1 << 20, 0, b"")[1] == 0, "it is not committed"


@with_loops
@pytest.mark.parametrize(("begin", "end"), [(-1, 10), (5, 4), (0, 1 << 40), (1 << 70, 1 << 70)])
def test_borders_outside_of_the_bytes_are_refused(begin: int, end: int) -> None:
    run = MemoryNode(partitions=1).engine.get_run
    assert run is not None
    with pytest.raises((ValueError, OverflowError)):
        run.answer(a_request("get", KEYS[0], 1), begin, end, [], 0, 0, 9, 100, 0, b"")


@with_loops
def test_a_class_without_slots_is_refused() -> None:
    others = (lambda: None, lambda *_: None, StoreDamagedError)
    with pytest.raises((TypeError, AttributeError)):
        get_run([object()], *others)
    with pytest.raises(ValueError, match="no partition"):
        get_run([], *others)


NO_MEMORY = """
import _testcapi
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode
from dcp.wire.feature import Feature

node = MemoryNode(partitions=4)
peer = node.connect()
peer.hello(Feature.COLLECTIONS, Feature.MUTATION_SEQNO)
keys = [b"\\0key%06d" % number for number in range(6)]
for key in keys:
    peer.ask(Opcode.SET, vb_id=1, key=key, value=b"v" * 700, extras=bytes(8))
node.commit()
data = b"".join(pack_request(Opcode.GET, vb_id=1, key=key) for key in keys)

def attempt(fail_at):
    answers, run = [], node.engine.get_run
    _testcapi.set_nomemory(fail_at, fail_at + 1)
    try:
        run.answer(data, 0, len(data), answers, 0, 0, 9, 1 << 20, 0, b"")
    except MemoryError:
        return True
    finally:
        _testcapi.remove_mem_hooks()
    assert len(answers) == len(keys)
    return False

assert sum(attempt(fail_at) for fail_at in range(30)) > 6
assert not attempt(1000)
"""


@with_loops
def test_a_run_that_memory_runs_out_for_says_so() -> None:
    """One allocation after the other fails. In a process of its own, whose memory it is."""
    pytest.importorskip("_testcapi")
    root = Path(__file__).parents[2]
    path = os.pathsep.join((str(root), str(root / "tests")))
    done = subprocess.run(
        [sys.executable, "-c", NO_MEMORY], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
