"""Streams and collections: filters, system events, SEQNO_ADVANCED, dropped collections."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import EndReason, parse_marker, parse_stream_end
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.engine import Engine
from vbucket.engine.lifecycle import failover, set_state
from vbucket.engine.partition import VbState
from vbucket.model.manifest import ManifestEvent, SystemEventKind, parse_system_event

VB = 5
HOTEL, FLIGHT = 8, 9
EVERYTHING = None
KIND = SystemEventKind


@pytest.fixture
def node() -> MemoryNode:
    """Collections inventory.hotel (8) and inventory.flight (9)."""
    node = MemoryNode()
    for change in (
        lambda now: now.create_scope("inventory"),
        lambda now: now.create_collection("inventory", "hotel"),
        lambda now: now.create_collection("inventory", "flight"),
    ):
        node.engine.keyspace.set_manifest(change(node.engine.keyspace.manifest))
    node.commit()
    return node


def with_collections(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, Feature.XERROR)
    return peer


def consumer(node: MemoryNode, *, collections: bool = True) -> Peer:
    peer = node.connect()
    peer.hello(*([Feature.COLLECTIONS] if collections else []))
    assert peer.open(b"c%d" % id(peer)).status == 0
    assert peer.control(b"enable_noop", b"true").status == 0
    return peer


def set_active(engine: Engine, vb_id: int) -> None:
    set_state(engine, vb_id, VbState.ACTIVE)


def drop(node: MemoryNode, name: str) -> None:
    node.engine.keyspace.set_manifest(
        node.engine.keyspace.manifest.drop_collection("inventory", name)
    )


def ask(peer: Peer, document: dict | None, **parts: int) -> Frame:
    value = b"" if document is None else json.dumps(document).encode()
    return peer.stream(VB, value=value, **parts)


class Seen(NamedTuple):
    """What a stream brought, in order."""

    what: str
    seqno: int
    key: bytes = b""


def seen(frames: list[Frame]) -> list[Seen]:
    """Return the messages; fail where a snapshot is empty or does not end on its end."""
    found: list[Seen] = []
    end = None
    for frame in frames:
        if frame.opcode == Opcode.DCP_NOOP:
            continue
        if frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            assert end is None, "the snapshot before reached its end"
            end = parse_marker(frame).end_seqno
            found.append(Seen("marker", end))
            continue
        if frame.opcode == Opcode.DCP_STREAM_END:
            found.append(Seen(f"end {parse_stream_end(frame)}", 0))
            end = None
            continue
        assert end is not None, "inside a snapshot"
        seqno = int.from_bytes(frame.extras[:8], "big")
        assert seqno <= end
        name = Opcode(frame.opcode).name.removeprefix("DCP_").lower()
        found.append(Seen(name, seqno, frame.key))
        if seqno == end:
            end = None
    assert end is None, "the last snapshot reached its end"
    return found


def event_of(frame: Frame) -> ManifestEvent:
    kind, version = int.from_bytes(frame.extras[8:12], "big"), frame.extras[12]
    return parse_system_event(kind, version, frame.key, frame.value)


def fill(node: MemoryNode) -> None:
    """Seqnos 4 to 9: hotel a, default a, flight a, hotel b, default b, flight a again."""
    writer = with_collections(node)
    for key in (b"\x08a", b"\0a", b"\x09a", b"\x08b", b"\0b", b"\x09a"):
        assert writer.set(VB, key, b"v").status == 0
    node.commit()


# -- what each connection sees ---------------------------------------------------------------------


def test_collections_without_filter_bring_all_in_seqno_order(
    node: MemoryNode,
) -> None:
    fill(node)
    peer = consumer(node)
    assert ask(peer, EVERYTHING).status == 0
    frames = peer.drain()
    assert seen(frames) == [
        Seen("marker", 9),
        Seen("system_event", 1, b"inventory"),
        Seen("system_event", 2, b"hotel"),
        Seen("system_event", 3, b"flight"),
        Seen("mutation", 4, b"\x08a"),
        Seen("mutation", 5, b"\0a"),
        Seen("mutation", 7, b"\x08b"),
        Seen("mutation", 8, b"\0b"),
        Seen("mutation", 9, b"\x09a"),
    ]
    assert [event_of(frame) for frame in frames[1:4]] == [
        ManifestEvent(KIND.CREATE_SCOPE, 1, 8, name="inventory"),
        ManifestEvent(KIND.CREATE_COLLECTION, 2, 8, HOTEL, "hotel"),
        ManifestEvent(KIND.CREATE_COLLECTION, 3, 8, FLIGHT, "flight"),
    ]
    assert all(frame.cas == 0 and frame.opaque == 7 for frame in frames[1:4])


@pytest.mark.parametrize("merged", [False, True])
def test_without_collections_snapshots_end_on_an_item(node: MemoryNode, merged: bool) -> None:
    fill(node)
    if merged:
        node.merge()
    peer = consumer(node, collections=False)
    assert peer.stream(VB).status == 0
    assert seen(peer.drain()) == [
        Seen("marker", 8),
        Seen("mutation", 5, b"a"),
        Seen("mutation", 8, b"b"),
    ]


def test_without_collections_no_snapshot_is_announced_empty(node: MemoryNode) -> None:
    peer = consumer(node, collections=False)
    peer.stream(VB)
    assert seen(peer.drain()) == []
    writer = with_collections(node)
    for key in (b"\x08a", b"\x09a"):
        writer.set(VB, key, b"v")
        node.commit()
        assert peer.drain() == []
    writer.set(VB, b"\0k", b"v")
    node.commit()
    frames = peer.drain()
    assert seen(frames) == [Seen("marker", 6), Seen("mutation", 6, b"k")]
    assert parse_marker(frames[0]).start_seqno == 0, "as if nothing else had been there"


def test_stream_with_an_end_ends_there_though_nothing_is_shown(node: MemoryNode) -> None:
    fill(node)
    for start, end, items in ((0, 9, [5, 8]), (8, 9, []), (0, 7, [5]), (0, 3, [])):
        peer = consumer(node, collections=False)
        peer.control(b"x_exact_end", b"true")
        uuid = node.engine.partitions[VB].vb_uuid
        assert peer.stream(VB, start, end, uuid=uuid).status == 0
        found = seen(peer.drain())
        assert [item.seqno for item in found if item.what == "mutation"] == items
        assert found[-1].what == f"end {EndReason.OK:d}"
        assert len([item for item in found if item.what == "marker"]) == bool(items)


def test_without_the_extension_it_completes_the_snapshot(
    node: MemoryNode,
) -> None:
    fill(node)
    for end in (3, 7, 8, 9):
        peer = consumer(node, collections=False)
        assert peer.stream(VB, 0, end).status == 0
        found = seen(peer.drain())
        assert [item.seqno for item in found if item.what == "mutation"] == [5, 8]
        assert (found[0].what, found[0].seqno) == ("marker", 8)
        assert found[-1].what == f"end {EndReason.OK:d}"


def test_a_filter_brings_its_collections_and_advances_to_the_end(node: MemoryNode) -> None:
    fill(node)
    peer = consumer(node)
    assert ask(peer, {"collections": ["8"]}).status == 0
    assert seen(peer.drain()) == [
        Seen("marker", 9),
        Seen("system_event", 2, b"hotel"),
        Seen("mutation", 4, b"\x08a"),
        Seen("mutation", 7, b"\x08b"),
        Seen("seqno_advanced", 9),
    ]


def test_snapshot_filtered_empty_is_marker_and_seqno_advanced(
    node: MemoryNode,
) -> None:
    peer = consumer(node)
    ask(peer, {"collections": ["0"]})
    assert seen(peer.drain()) == [Seen("marker", 3), Seen("seqno_advanced", 3)]


def test_seqno_advanced_counts_in_flow_control(node: MemoryNode) -> None:
    peer = consumer(node)
    peer.control(b"connection_buffer_size", b"1000")
    ask(peer, {"collections": ["0"]})
    peer.drain()
    assert peer.producer.unacked_bytes == 44 + 32


def test_a_scope_brings_what_is_in_it_now_and_later(node: MemoryNode) -> None:
    fill(node)
    peer = consumer(node)
    assert ask(peer, {"scope": "8", "uid": "0"}).status == 0
    peer.drain()
    manifest = node.engine.keyspace.manifest.create_collection("inventory", "car", 60)
    node.engine.keyspace.set_manifest(manifest.create_collection("_default", "other"))
    writer = with_collections(node)
    for key in (b"\x0ac", b"\x0bo", b"\0d"):
        assert writer.set(VB, key, b"v").status == 0
    node.commit()
    assert seen(peer.drain()) == [
        Seen("marker", 14),
        Seen("system_event", 10, b"car"),
        Seen("mutation", 12, b"\x0ac"),
        Seen("seqno_advanced", 14),
    ]


def test_ids_of_more_than_one_byte(node: MemoryNode) -> None:
    manifest = node.engine.keyspace.manifest._replace(next_collection_id=300)
    node.engine.keyspace.set_manifest(manifest.create_collection("inventory", "large"))
    writer = with_collections(node)
    assert writer.set(VB, b"\xac\x02key", b"v").status == 0
    node.commit()
    peer = consumer(node)
    assert ask(peer, {"collections": ["12c"]}).status == 0
    assert seen(peer.drain())[1:] == [
        Seen("system_event", 4, b"large"),
        Seen("mutation", 5, b"\xac\x02key"),
    ]


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "status"),
    [
        ({"collections": ["a"]}, Status.UNKNOWN_COLLECTION),
        ({"collections": ["8", "1"]}, Status.UNKNOWN_COLLECTION),
        ({"scope": "9"}, Status.UNKNOWN_SCOPE),
        ({"scope": "8", "collections": ["8"]}, Status.EINVAL),
        ({"collections": []}, Status.EINVAL),
        ({"collections": [8]}, Status.EINVAL),
        ({"collections": "8"}, Status.EINVAL),
        ({"collections": ["0x8"]}, Status.EINVAL),
        ({"scope": 8}, Status.EINVAL),
        ({"uid": 3}, Status.EINVAL),
        ({"uid": "ffff"}, Status.OK),
        ({"uid": "0", "something": {"new": 1}}, Status.OK),
        ({"collections": ["8", "8"]}, Status.OK),
    ],
)
def test_filters_are_checked(node: MemoryNode, document: dict, status: Status) -> None:
    peer = consumer(node)
    assert ask(peer, document).status == status


@pytest.mark.parametrize(
    ("document", "why"),
    [({"collections": ["a"]}, "there is no collection a"), ({"scope": "9"}, "there is no scope 9")],
)
@pytest.mark.parametrize("has_xerror", [False, True])
def test_filter_for_what_is_not_there_is_told_manifests_uid(
    node: MemoryNode, document: dict, why: str, has_xerror: bool
) -> None:
    peer = node.connect()
    peer.hello(Feature.COLLECTIONS, *([Feature.XERROR] if has_xerror else []))
    peer.open()
    peer.control(b"enable_noop", b"true")
    body = json.loads(ask(peer, document).value)
    uid = node.engine.keyspace.manifest.uid
    assert uid
    assert body.pop("manifest_uid") == f"{uid:x}"
    assert body == ({"error": {"context": f"{why} in manifest {uid:x}"}} if has_xerror else {})


def test_drop_that_is_not_committed_refuses_filter_after_commit(node: MemoryNode) -> None:
    peer = consumer(node)
    drop(node, "hotel")
    assert ask(peer, {"collections": ["8"]}).status == Status.UNKNOWN_COLLECTION
    assert peer.must_wait


# -- dropping --------------------------------------------------------------------------------------


def test_the_last_collection_of_a_filter_is_dropped(node: MemoryNode) -> None:
    fill(node)
    peer = consumer(node)
    ask(peer, {"collections": ["8", "9"]})
    peer.drain()
    drop(node, "hotel")
    node.commit()
    assert seen(peer.drain()) == [Seen("marker", 10), Seen("system_event", 10)]
    drop(node, "flight")
    with_collections(node).set(VB, b"\0z", b"v")
    node.commit()
    frames = peer.drain()
    assert event_of(frames[1]) == ManifestEvent(KIND.DROP_COLLECTION, 5, 8, FLIGHT)
    assert [(item.what, item.seqno) for item in seen(frames)] == [
        ("marker", 12),
        ("system_event", 11),
        ("seqno_advanced", 12),
        ("end 7", 0),
    ]
    assert peer.producer.stream_count == 0
    assert node.hub.stream_count == 0


def test_a_scope_filter_ends_with_its_scope(node: MemoryNode) -> None:
    peer = consumer(node)
    ask(peer, {"scope": "8"})
    peer.drain()
    node.engine.keyspace.set_manifest(node.engine.keyspace.manifest.drop_scope("inventory"))
    node.commit()
    frames = peer.drain()
    assert [event_of(frame).kind for frame in frames[1:-1]] == [
        KIND.DROP_COLLECTION,
        KIND.DROP_COLLECTION,
        KIND.DROP_SCOPE,
    ]
    assert parse_stream_end(frames[-1]) == EndReason.FILTER_EMPTY


def test_a_stream_without_a_filter_outlives_every_drop(node: MemoryNode) -> None:
    peer = consumer(node)
    ask(peer, EVERYTHING)
    node.engine.keyspace.set_manifest(node.engine.keyspace.manifest.drop_scope("inventory"))
    node.commit()
    assert [item.what for item in seen(peer.drain())] == ["marker", *["system_event"] * 6]
    assert peer.producer.stream_count == 1


@pytest.mark.parametrize("merged", [False, True])
def test_backfill_omits_what_was_dropped_but_shows_its_events(
    node: MemoryNode, merged: bool
) -> None:
    fill(node)
    drop(node, "flight")
    node.commit()
    if merged:
        node.merge()
    peer = consumer(node)
    ask(peer, EVERYTHING)
    assert [(item.what, item.seqno) for item in seen(peer.drain())] == [
        ("marker", 10),
        ("system_event", 1),
        ("system_event", 2),
        ("system_event", 3),
        ("mutation", 4),
        ("mutation", 5),
        ("mutation", 7),
        ("mutation", 8),
        ("system_event", 10),
    ]


def test_a_drop_that_a_crash_took_back_has_hidden_nothing(node: MemoryNode) -> None:
    fill(node)
    drop(node, "hotel")
    peer = consumer(node)
    ask(peer, EVERYTHING)
    assert Seen("mutation", 4, b"\x08a") in seen(peer.drain()), "the drop is not committed"
    node.crash()
    assert HOTEL in node.engine.keyspace.manifest.collections
    peer = consumer(node)
    ask(peer, {"collections": ["8"]})
    assert [item.seqno for item in seen(peer.drain()) if item.what == "mutation"] == [4, 7]


def test_a_collection_of_the_same_name_is_another(node: MemoryNode) -> None:
    fill(node)
    drop(node, "hotel")
    node.engine.keyspace.set_manifest(
        node.engine.keyspace.manifest.create_collection("inventory", "hotel")
    )
    node.commit()
    peer = consumer(node)
    assert ask(peer, {"collections": ["8"]}).status == Status.UNKNOWN_COLLECTION
    assert ask(peer, {"collections": ["a"]}).status == 0
    assert seen(peer.drain()) == [Seen("marker", 11), Seen("system_event", 11, b"hotel")]


# -- history branches ------------------------------------------------------------------------------


def test_a_branch_below_an_event_tells_it_again(node: MemoryNode) -> None:
    """The manifest is the node's: it does not go back, the partition catches up with it."""
    fill(node)
    drop(node, "hotel")
    node.commit()
    branch = node.engine.keyspace.branch(VB, 2)
    node.commit()
    assert branch.undone_seqnos == 8
    peer = consumer(node)
    ask(peer, EVERYTHING)
    frames = peer.drain()
    assert [(item.what, item.seqno, item.key) for item in seen(frames)] == [
        ("marker", 4, b""),
        ("system_event", 1, b"inventory"),
        ("system_event", 2, b"hotel"),
        ("system_event", 3, b""),
        ("system_event", 4, b"flight"),
    ]
    assert event_of(frames[3]).kind == KIND.DROP_COLLECTION
    assert node.engine.partitions[VB].item_count == 0


@pytest.mark.parametrize("becomes_active", [set_active, failover])
def test_a_partition_that_was_not_active_catches_up(node: MemoryNode, becomes_active) -> None:
    set_state(node.engine, VB, VbState.REPLICA)
    node.engine.keyspace.set_manifest(
        node.engine.keyspace.manifest.create_collection("inventory", "car")
    )
    drop(node, "hotel")
    node.commit()
    assert node.engine.partitions[VB].high_seqno == 3, "a replica makes no changes of its own"
    becomes_active(node.engine, VB)
    node.commit()
    peer = consumer(node)
    ask(peer, EVERYTHING)
    assert [(item.what, item.seqno, item.key) for item in seen(peer.drain())][4:] == [
        ("system_event", 4, b""),
        ("system_event", 5, b"car"),
    ]


# -- purges ----------------------------------------------------------------------------------------


def test_filter_of_unchanged_collections_need_not_roll_back(
    node: MemoryNode,
) -> None:
    fill(node)
    part = node.engine.partitions[VB]
    part.purge_seqno = 8
    peer = consumer(node)
    at_7 = {"start": 7, "uuid": part.vb_uuid}
    assert ask(peer, {"collections": ["9"]}, **at_7).status == Status.ROLLBACK
    assert ask(peer, EVERYTHING, **at_7).status == Status.ROLLBACK
    assert ask(peer, {"collections": ["8"]}, **at_7).status == Status.OK


# -- any order -------------------------------------------------------------------------------------

STEPS = st.lists(
    st.sampled_from(("default", "hotel", "flight", "remove", "commit", "merge", "pump", "drop")),
    max_size=40,
)


@given(STEPS, st.integers(1, 400))
def test_every_filter_ends_with_the_documents_of_its_collections(
    steps: list[str], bytes_max: int
) -> None:
    node = MemoryNode()
    now = node.engine.keyspace.manifest
    for name in ("hotel", "flight"):
        now = now.create_collection("_default", name)
    node.engine.keyspace.set_manifest(now)
    writer = with_collections(node)
    peers = {
        "legacy": consumer(node, collections=False),
        "all": consumer(node),
        "hotel": consumer(node),
    }
    node.commit()
    peers["legacy"].stream(VB)
    ask(peers["all"], EVERYTHING)
    ask(peers["hotel"], {"collections": ["8"]})
    ids = {"default": b"\0", "hotel": b"\x08", "flight": b"\x09"}
    frames: dict[str, list[Frame]] = {name: [] for name in peers}
    truth: dict[bytes, bytes] = {}
    for number, step in enumerate(steps):
        key = ids.get(step, b"\0") + b"k%d" % (number % 3)
        if step in ids:
            if writer.set(VB, key, b"%d" % number).status == 0:
                truth[key] = b"%d" % number
        elif step == "remove":
            for key in [key for key in truth if key.endswith(b"%d" % (number % 3))]:
                writer.delete(VB, key)
                del truth[key]
        elif step == "drop" and HOTEL in node.engine.keyspace.manifest.collections:
            node.engine.keyspace.set_manifest(
                node.engine.keyspace.manifest.drop_collection("_default", "hotel")
            )
            truth = {key: value for key, value in truth.items() if key[0] != HOTEL}
        elif step == "commit":
            node.commit()
        elif step == "merge":
            node.merge()
        else:
            for name, peer in peers.items():
                frames[name] += peer.pump(bytes_max)
    node.commit()
    for name, peer in peers.items():
        frames[name] += peer.drain(bytes_max)
        seen(frames[name])
    dropped = HOTEL not in node.engine.keyspace.manifest.collections
    assert documents(frames["legacy"]) == {k[1:]: v for k, v in truth.items() if not k[0]}
    shown = documents(frames["all"])
    assert {k: v for k, v in shown.items() if not (dropped and k[0] == HOTEL)} == truth
    if dropped:
        assert seen(frames["hotel"])[-1].what == "end 7"
    else:
        assert documents(frames["hotel"]) == {k: v for k, v in truth.items() if k[0] == HOTEL}


def documents(frames: list[Frame]) -> dict[bytes, bytes]:
    """Return what a consumer holds in the end."""
    held: dict[bytes, bytes] = {}
    for frame in frames:
        if frame.opcode == Opcode.DCP_MUTATION:
            held[frame.key] = frame.value
        elif frame.opcode == Opcode.DCP_DELETION:
            held.pop(frame.key, None)
    return held
