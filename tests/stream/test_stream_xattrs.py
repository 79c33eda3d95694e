"""XATTRs in streams: sent to those who ask for them, and to nobody else."""

from __future__ import annotations

import struct

import pytest

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.message import OpenFlag
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import pack_xattrs
from stream.shape import VB, connect
from support.memory_node import MemoryNode, Peer
from support.subdoc_client import ACCESS_DELETED, XATTR, aware_peer, mutate

UPSERT = Opcode.SUBDOC_DICT_UPSERT
BOTH = pack_xattrs([(b"user", b"1.0"), (b"_sys", b"2")])
SYSTEM = pack_xattrs([(b"_sys", b"2")])
INCLUDE = OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS
CHANGES = {Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION}


def write(node: MemoryNode) -> None:
    """A plain document, one with XATTRs, a deletion and an expiry that keep the system ones, and a
    deletion with a user's one.
    """
    peer = aware_peer(node)
    for key in (b"plain", b"full", b"gone", b"due"):
        peer.ask(Opcode.SET, vb_id=VB, key=key, value=b'{"v":1}', extras=bytes(8), datatype=1)
        if key != b"plain":
            mutate(
                peer,
                key,
                (UPSERT, XATTR, b"user", b"1.0"),
                (UPSERT, XATTR, b"_sys", b"2"),
                vb_id=VB,
            )
    peer.delete(VB, b"gone")
    peer.ask(Opcode.TOUCH, vb_id=VB, key=b"due", extras=struct.pack(">I", 5))
    node.now_ns += 6 * 10**9
    peer.ask(Opcode.GET, vb_id=VB, key=b"due")
    peer.set(VB, b"staged", b"x")
    peer.delete(VB, b"staged")
    mutate(peer, b"staged", (UPSERT, XATTR, b"user", b"1.0"), (UPSERT, XATTR, b"_sys", b"2"),
           vb_id=VB, doc_flags=ACCESS_DELETED)  # fmt: skip
    node.commit()


def sent(node: MemoryNode, *features: int, flags: int) -> dict[bytes, tuple[int, int, bytes]]:
    peer = connect(node, *features, flags=flags, enable_noop="true")
    peer.stream(VB)
    return {
        frame.key.removeprefix(b"\0"): (frame.opcode, frame.datatype, frame.value)
        for frame in peer.drain()
        if frame.opcode in CHANGES
    }


SET, DEL = Opcode.DCP_MUTATION, Opcode.DCP_DELETION
BODY = b'{"v":1}'
WITHOUT = {
    b"plain": (SET, 1, BODY), b"full": (SET, 1, BODY), b"gone": (DEL, 0, b""),
    b"due": (DEL, 0, b""), b"staged": (DEL, 0, b""),
}  # fmt: skip
INCLUDED = {
    b"plain": (SET, 1, BODY), b"full": (SET, 5, BOTH + BODY), b"gone": (DEL, 4, SYSTEM),
    b"due": (DEL, 4, SYSTEM), b"staged": (DEL, 4, SYSTEM),
}  # fmt: skip
NO_VALUES = {
    b"plain": (SET, 0, b""), b"full": (SET, 4, BOTH), b"gone": (DEL, 4, SYSTEM),
    b"due": (DEL, 4, SYSTEM), b"staged": (DEL, 4, SYSTEM),
}  # fmt: skip
JSON, X, COLLECTIONS = Feature.JSON, Feature.XATTR, Feature.COLLECTIONS
CASES = {
    "not asked for": ((JSON, X), OpenFlag.PRODUCER, WITHOUT),
    "asked for without HELLO XATTR": ((JSON,), INCLUDE, INCLUDED),
    "asked for": ((JSON, X), INCLUDE, INCLUDED),
    "with deleted user XATTRs": (
        (JSON, X), INCLUDE | OpenFlag.INCLUDE_DELETED_USER_XATTRS,
        {**INCLUDED, b"staged": (DEL, 4, BOTH)},
    ),
    "without values": ((JSON, X), INCLUDE | OpenFlag.NO_VALUE, NO_VALUES),
    "without values, with datatypes": (
        (JSON, X), INCLUDE | OpenFlag.NO_VALUE_WITH_DATATYPE,
        {**NO_VALUES, b"plain": (SET, 1, b""), b"full": (SET, 5, BOTH)},
    ),
    "nothing but keys": (
        (JSON, X), OpenFlag.PRODUCER | OpenFlag.NO_VALUE_WITH_DATATYPE,
        {key: (kind, datatype, b"") for key, (kind, datatype, _) in WITHOUT.items()},
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_merged", [False, True])
@pytest.mark.parametrize("more", [(), (COLLECTIONS,)])
@pytest.mark.parametrize(("features", "flags", "wanted"), CASES.values(), ids=CASES)
def test_who_gets_them(
    node: MemoryNode,
    features: tuple[int, ...],
    flags: int,
    wanted: dict[bytes, tuple[int, int, bytes]],
    more: tuple[int, ...],
    is_merged: bool,
) -> None:
    write(node)
    if is_merged:
        node.merge()
    assert sent(node, *features, *more, flags=flags) == wanted


def test_dcp_clients_get_the_json_bit_without_asking(node: MemoryNode) -> None:
    write(node)
    found = sent(node, X, COLLECTIONS, flags=INCLUDE)
    assert {datatype for _, datatype, _ in found.values()} == {1, 4, 5}
    assert found[b"full"] == (SET, 5, BOTH + BODY)


def test_live_changes_and_those_of_a_history_stream(node: MemoryNode) -> None:
    peers = {
        flags: connect(
            node, JSON, X, COLLECTIONS, flags=flags, enable_noop="true", change_streams="true"
        )
        for flags in (OpenFlag.PRODUCER, INCLUDE)
    }
    for peer in peers.values():
        peer.stream(VB)
        peer.drain()
    write(node)

    def values(peer: Peer, key: bytes) -> list[bytes]:
        frames: list[Frame] = peer.drain()
        return [frame.value for frame in frames if frame.key == b"\0" + key]

    assert values(peers[OpenFlag.PRODUCER], b"full") == [BODY, BODY]
    assert values(peers[INCLUDE], b"full") == [BODY, BOTH + BODY]
    late = connect(
        node, JSON, X, COLLECTIONS, flags=INCLUDE, enable_noop="true", change_streams="true"
    )
    late.stream(VB)
    assert values(late, b"gone") == [BODY, BOTH + BODY, SYSTEM]


def test_the_value_that_a_change_replaced_has_no_xattrs(node: MemoryNode) -> None:
    write(node)
    peer = connect(
        node, JSON, X, flags=INCLUDE, enable_noop="true", x_previous_value="true",
        change_streams="true",
    )  # fmt: skip
    peer.stream(VB)
    told = [frame for frame in peer.drain() if frame.opcode == Opcode.DCP_PREVIOUS_VALUE]
    assert told
    assert {(frame.value, frame.datatype) for frame in told} <= {(BODY, 1), (b"x", 0)}
