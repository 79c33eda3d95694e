"""Packs sub-document requests and reads their answers, for tests."""

from __future__ import annotations

import struct
from typing import Any

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, pack_request
from dcp.wire.opcode import Opcode
from support.memory_node import MemoryNode, Peer

MKDIR_P, XATTR, MACRO = 0x01, 0x04, 0x10
MKDOC, ADD, ACCESS_DELETED, CREATE_AS_DELETED, REVIVE = 0x01, 0x02, 0x04, 0x08, 0x10

Spec = tuple[int, int, bytes] | tuple[int, int, bytes, bytes]
"""Opcode, path flags, path, and in mutations the value."""


def aware_peer(node: MemoryNode, *features: int) -> Peer:
    """A peer with mutation tokens, JSON and XATTRs."""
    peer = node.connect()
    peer.hello(Feature.MUTATION_SEQNO, Feature.JSON, Feature.XATTR, Feature.XERROR, *features)
    return peer


def extras_of(expiry: int | None, doc_flags: int) -> bytes:
    extras = b"" if expiry is None else struct.pack(">I", expiry)
    return extras + (bytes([doc_flags]) if doc_flags else b"")


def single(
    peer: Peer,
    opcode: int,
    key: bytes,
    path: bytes,
    value: bytes = b"",
    *,
    vb_id: int = 5,
    flags: int = 0,
    doc_flags: int = 0,
    expiry: int | None = None,
    cas: int = 0,
) -> Frame:
    """Send a request with one path."""
    extras = struct.pack(">HB", len(path), flags) + extras_of(expiry, doc_flags)
    return peer.ask(opcode, vb_id=vb_id, key=key, value=path + value, extras=extras, cas=cas)


def lookup_value(*specs: Spec) -> bytes:
    return b"".join(struct.pack(">BBH", op, flags, len(path)) + path for op, flags, path in specs)  # type: ignore[misc]


def mutation_value(*specs: Any) -> bytes:
    whole = [(*spec, b"")[:4] for spec in specs]
    return b"".join(
        struct.pack(">BBHI", op, flags, len(path), len(value)) + path + value
        for op, flags, path, value in whole
    )


def look_up(
    peer: Peer, key: bytes, *specs: Spec, vb_id: int = 5, doc_flags: int = 0, cas: int = 0
) -> tuple[int, list[tuple[int, bytes]]]:
    """Send a SUBDOC_MULTI_LOOKUP; return the status, and status and value of each look-up."""
    answer = peer.ask(
        Opcode.SUBDOC_MULTI_LOOKUP, vb_id=vb_id, key=key, value=lookup_value(*specs),
        extras=extras_of(None, doc_flags), cas=cas,
    )  # fmt: skip
    has_results = answer.status in {0, 0xCC, 0xCD, 0xD3}
    return answer.status, results(answer.value) if has_results else []


def results(value: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(value):
        status, length = struct.unpack_from(">HI", value, at)
        at += 6 + length
        found.append((status, value[at - length : at]))
    assert at == len(value)
    return found


def mutate(
    peer: Peer,
    key: bytes,
    *specs: Any,
    vb_id: int = 5,
    doc_flags: int = 0,
    expiry: int | None = None,
    cas: int = 0,
) -> Frame:
    """Send a SUBDOC_MULTI_MUTATION."""
    return peer.ask(
        Opcode.SUBDOC_MULTI_MUTATION, vb_id=vb_id, key=key, value=mutation_value(*specs),
        extras=extras_of(expiry, doc_flags), cas=cas,
    )  # fmt: skip


def mutation_results(value: bytes) -> list[tuple[int, int, bytes]]:
    """Return index, status and value of a successful SUBDOC_MULTI_MUTATION's results."""
    found, at = [], 0
    while at < len(value):
        index, status, length = struct.unpack_from(">BHI", value, at)
        at += 7 + length
        found.append((index, status, value[at - length : at]))
    return found


def body(peer: Peer, key: bytes, vb_id: int = 5) -> bytes:
    """What GET answers."""
    answer = peer.ask(Opcode.GET, vb_id=vb_id, key=key)
    assert answer.status == 0, answer
    return answer.value


def packed_mutation(key: bytes, *specs: Any, vb_id: int = 5, opaque: int = 0) -> bytes:
    return pack_request(
        Opcode.SUBDOC_MULTI_MUTATION, vb_id=vb_id, key=key, value=mutation_value(*specs),
        opaque=opaque,
    )  # fmt: skip
