"""GETs that come together are answered as GETs that come one by one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.state import ANSWER_BYTES_MAX
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState
from vbucket.model.ids import NUM_VBUCKETS
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
            ["getk", "getq", "extras", "value", "nothing", "no key", "long key", "collection",
             "datatype", "elsewhere", "nowhere", "set", "noop"]
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
