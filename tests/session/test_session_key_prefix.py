"""x_key_prefix: a stream of those keys alone that begin so, and what a request may say."""

from __future__ import annotations

import json

import pytest

from dcp.session.controls import KEY_PREFIXES_MAX
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import U64
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

VB = 7


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def connected(node: MemoryNode, *, has_collections: bool, is_negotiated: bool = True) -> Peer:
    peer = node.connect()
    peer.hello(Feature.XERROR, *[Feature.COLLECTIONS] * has_collections)
    peer.open(b"prefixed")
    assert peer.control(b"enable_noop", b"true").status == Status.OK
    if is_negotiated:
        assert peer.control(b"x_key_prefix", b"true").status == Status.OK
    return peer


def value_of(*prefixes: bytes) -> bytes:
    return json.dumps({"key_prefixes": [prefix.hex() for prefix in prefixes]}).encode()


def write(node: MemoryNode, *keys: bytes) -> None:
    writer = node.connect()
    writer.hello()
    for key in keys:
        assert writer.set(VB, key, b"v").status == Status.OK
    node.commit()


def shown(frames: list[Frame], has_collections: bool) -> list[tuple[str, object]]:
    """Return what came: keys, ends of snapshots on nothing, markers."""
    rows: list[tuple[str, object]] = []
    for frame in frames:
        if frame.opcode == Opcode.DCP_MUTATION:
            rows.append(("key", frame.key[has_collections:]))
        elif frame.opcode == Opcode.DCP_SEQNO_ADVANCED:
            rows.append(("advanced", U64.unpack_from(frame.extras)[0]))
        elif frame.opcode == Opcode.DCP_SNAPSHOT_MARKER:
            rows.append(("marker", U64.unpack_from(frame.extras, 8)[0]))
    return rows


@pytest.mark.parametrize("has_collections", [False, True])
def test_keys_that_begin_so_come_and_snapshots_reach_their_end(node, has_collections):
    write(node, b"user:1", b"order:1", b"use", b"user:2", b"cart:1")
    peer = connected(node, has_collections=has_collections)
    assert peer.stream(VB, value=value_of(b"user:", b"cart:1")).status == Status.OK
    assert shown(peer.drain(), has_collections) == [
        ("marker", 5), ("key", b"user:1"), ("key", b"user:2"), ("key", b"cart:1"),
    ]  # fmt: skip
    write(node, b"order:2")
    assert shown(peer.drain(), has_collections) == [("marker", 6), ("advanced", 6)]
    write(node, b"user:3", b"order:3")
    assert shown(peer.drain(), has_collections) == [
        ("marker", 8), ("key", b"user:3"), ("advanced", 8),
    ]  # fmt: skip


def test_an_end_seqno_is_reached_on_a_key_of_another_prefix(node):
    write(node, b"user:1", b"order:1")
    peer = connected(node, has_collections=False)
    peer.stream(VB, end=2, value=value_of(b"user:"))
    frames = peer.drain()
    assert shown(frames, False)[-1] == ("advanced", 2)
    assert frames[-1].opcode == Opcode.DCP_STREAM_END


def test_who_did_not_negotiate_it_gets_everything(node):
    write(node, b"user:1", b"order:1")
    peer = connected(node, has_collections=True, is_negotiated=False)
    assert peer.stream(VB, value=value_of(b"user:")).status == Status.OK
    assert [name for name, _ in shown(peer.drain(), True)] == ["marker", "key", "key"]


@pytest.mark.parametrize(
    "prefixes",
    [[], "75", [1], [""], ["7"], ["zz"], ["75" * 251], ["75"] * (KEY_PREFIXES_MAX + 1), {"a": 1}],
)
def test_what_is_no_list_of_prefixes_is_refused(node, prefixes):
    peer = connected(node, has_collections=True)
    answer = peer.stream(VB, value=json.dumps({"key_prefixes": prefixes}).encode())
    assert answer.status == Status.EINVAL
    assert b"hexadecimal" in answer.value


def test_a_takeover_has_no_prefix(node):
    peer = node.connect()
    peer.hello(Feature.XERROR, Feature.COLLECTIONS)
    peer.ask(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0guest\0guest")
    peer.open(b"taker")
    peer.control(b"enable_noop", b"true")
    peer.control(b"x_key_prefix", b"true")
    answer = peer.stream(VB, flags=1, value=value_of(b"user:"))
    assert answer.status != Status.OK


@pytest.mark.parametrize("has_collections", [False, True])
def test_an_idle_stream_has_a_bookmark_before_a_purge_passes_it(node, has_collections):
    """Its keys do not change, and yet it has a place above what is purged to go on from."""
    write(node, b"user:1")
    peer = connected(node, has_collections=has_collections)
    assert peer.stream(VB, value=value_of(b"user:")).status == Status.OK
    write(node, b"order:1", b"order:2")
    (bookmark,) = [at for kind, at in shown(peer.drain(), has_collections) if kind == "advanced"]
    node.merge()
    assert node.raise_floor(VB, 3, 2).purge == 2
    node.commit()
    again = connected(node, has_collections=has_collections)
    uuid = node.engine.partitions[VB].vb_uuid
    answer = again.stream(VB, bookmark, uuid=uuid, value=value_of(b"user:"))
    assert answer.status == Status.OK


def test_a_client_without_bookmarks_is_not_sent_back_either(node):
    """One that does not know SEQNO_ADVANCED follows the default collection, and nothing that it
    could have missed there is purged.
    """
    manifest = node.engine.keyspace.manifest.create_collection("_default", "other", 0)
    node.engine.keyspace.set_manifest(manifest)
    write(node, b"a")
    held = node.engine.partitions[VB].high_seqno
    writer = node.connect()
    writer.hello(Feature.COLLECTIONS)
    for _ in range(3):
        assert writer.set(VB, b"\x08x", b"v").status == Status.OK
    node.commit()
    node.merge()
    high = node.engine.partitions[VB].high_seqno
    assert node.raise_floor(VB, high, high - 1).purge == high - 1 > held
    node.commit()
    peer = node.connect()
    peer.open(b"legacy")
    answer = peer.stream(VB, held, uuid=node.engine.partitions[VB].vb_uuid)
    assert answer.status == Status.OK
