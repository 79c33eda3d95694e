"""Lists keys with range scans: the keys of each partition as of one moment, without the values.

A node is asked for some partitions at a time: create their scans, then take their next keys until
there are no more. The server drops a scan that is not read to its end when the connection closes.

Invariant: every partition is listed once, by the node that serves it, or the listing ends with an
error. So a listing is complete or fails.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from struct import Struct
from typing import Final

from clients.address import ServerAddress
from clients.errors import ConnectError, OperationTimeoutError, UnsupportedError, error_from_status
from clients.link.handshake import FEATURES
from clients.link.pipelined_link import Link
from clients.link.topology import Topology, parse_topology, single_node
from clients.operation import collection_id_of
from dcp.wire.feature import Feature
from dcp.wire.frame import MAX_KEY_BYTES, Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.model.manifest import decode_leb128

PARTITIONS_AT_ONCE: Final = 64
"""Scans that are open at the same time on a node. A server allows 256 to all of its clients."""

_CONTINUE: Final = Struct(">16sIII")
_SCAN_ID_BYTES: Final = 16
_JSON: Final = 0x01
"""Datatype of the request."""
_GOES_ON: Final = frozenset({Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE})


async def list_keys(
    address: ServerAddress,
    prefix: bytes = b"",
    *,
    collection: str | None = None,
    timeout_s: float = 10.0,
) -> AsyncIterator[list[bytes]]:
    """Yield the keys that begin with a prefix, in lists; the lists are in no order.

    `timeout_s` bounds each answer. Raises ConnectError, OperationTimeoutError, TopologyError,
    UnknownCollectionError, NoAccessError and other StatusErrors.
    """
    seed = await _connect(address, timeout_s)
    links = {(seed.address.host, seed.address.port): seed}
    try:
        topology = _topology_of(seed)
        request = await _request_of(seed, prefix, collection, timeout_s)
        for place, vb_ids in _by_place(topology).items():
            if place not in links:
                links[place] = await _connect(address.at(*place), timeout_s)
            for at in range(0, len(vb_ids), PARTITIONS_AT_ONCE):
                some = vb_ids[at : at + PARTITIONS_AT_ONCE]
                scans = await _created(links[place], some, request, timeout_s)
                while scans:
                    yield await _continued(links[place], scans, timeout_s)
    finally:
        for link in links.values():
            link.close()
        await asyncio.sleep(0)  # lets the transports finish closing


async def _connect(address: ServerAddress, timeout_s: float) -> Link:
    return await Link.connect(address, timeout_s=timeout_s, features=(*FEATURES, Feature.JSON))


def _topology_of(link: Link) -> Topology:
    address = link.address
    config = link.handshake.config if link.handshake is not None else b""
    if not config:
        return single_node(address.host, address.port)
    return parse_topology(config, address.host, is_tls=address.is_tls)


def _by_place(topology: Topology) -> dict[tuple[str, int], list[int]]:
    """Return the partitions of each node. Raises TopologyError if one has no node."""
    found: dict[tuple[str, int], list[int]] = defaultdict(list)
    for vb_id in range(topology.num_vbuckets):
        node = topology.node_of(vb_id)
        found[node.host, node.kv_port].append(vb_id)
    return found


async def _request_of(link: Link, prefix: bytes, collection: str | None, timeout_s: float) -> bytes:
    """Return the body of the request that creates a scan."""
    collection_id = 0
    if collection is not None:
        if not link.has_collections:
            raise UnsupportedError("the server has no collections", node=link.node)
        (frame,) = await _asked(link, Opcode.GET_COLLECTION_ID, {0: collection.encode()}, timeout_s)
        collection_id = collection_id_of(frame, collection, link.node)
    # No key is longer, so this is at or above the last key with the prefix.
    end = prefix + b"\xff" * max(1, MAX_KEY_BYTES - len(prefix))
    bounds = {"start": b64encode(prefix).decode(), "end": b64encode(end).decode()}
    scan = {"collection": f"{collection_id:x}", "key_only": True, "range": bounds}
    return json.dumps(scan).encode()


async def _created(
    link: Link, vb_ids: Sequence[int], request: bytes, timeout_s: float
) -> dict[int, bytes]:
    """Create scans; return their ids by partition. A partition without such a key has none."""
    frames = await _asked(link, Opcode.RANGE_SCAN_CREATE, dict.fromkeys(vb_ids, request), timeout_s)
    scans: dict[int, bytes] = {}
    for vb_id, frame in zip(vb_ids, frames, strict=True):
        if frame.status == Status.KEY_ENOENT:
            continue
        if frame.status:
            raise _error(frame, vb_id, link.node)
        if len(frame.value) != _SCAN_ID_BYTES:
            raise ConnectError("the id of a scan is cut short", vb_id=vb_id, node=link.node)
        scans[vb_id] = frame.value
    return scans


async def _continued(link: Link, scans: dict[int, bytes], timeout_s: float) -> list[bytes]:
    """Return the next keys of all scans; remove the scans that are complete."""
    frames = await _asked(link, Opcode.RANGE_SCAN_CONTINUE, scans, timeout_s)
    keys: list[bytes] = []
    for vb_id, frame in zip(tuple(scans), frames, strict=True):
        if frame.status not in _GOES_ON:
            raise _error(frame, vb_id, link.node)
        if frame.status == Status.RANGE_SCAN_COMPLETE:
            del scans[vb_id]
        keys += _keys_of(frame.value, vb_id, link.node)
    return keys


async def _asked(
    link: Link, opcode: Opcode, bodies: Mapping[int, bytes], timeout_s: float
) -> list[Frame]:
    """Send one request to each partition; return the answers. A body is a name, the JSON that
    creates a scan, or the id of one, depending on the opcode.
    """
    first = link.take_opaques(len(bodies))
    packets = []
    for index, (vb_id, body) in enumerate(bodies.items()):
        opaque = first + index & 0xFFFF_FFFF
        match opcode:
            case Opcode.RANGE_SCAN_CREATE:
                packet = pack_request(
                    opcode, vb_id=vb_id, opaque=opaque, value=body, datatype=_JSON
                )
            case Opcode.RANGE_SCAN_CONTINUE:
                extras = _CONTINUE.pack(body, 0, 0, 0)
                packet = pack_request(opcode, vb_id=vb_id, opaque=opaque, extras=extras)
            case _:
                packet = pack_request(opcode, opaque=opaque, key=body)
        packets.append(packet)
    try:
        async with asyncio.timeout(timeout_s):
            return await link.send_batch(b"".join(packets), first, len(packets))
    except TimeoutError:
        raise OperationTimeoutError(
            f"list keys: no answer within {timeout_s:g} s", node=link.node
        ) from None


def _error(frame: Frame, vb_id: int, node: str) -> Exception:
    return error_from_status(frame.status, "list keys", body=frame.value, vb_id=vb_id, node=node)


def _keys_of(packed: bytes, vb_id: int, node: str) -> list[bytes]:
    """Return the keys of an answer: each follows its length as unsigned LEB128."""
    keys: list[bytes] = []
    at = 0
    while at < len(packed):
        size = decode_leb128(packed[at : at + 5])
        if size is None or at + size[1] + size[0] > len(packed):
            raise ConnectError("an answer with keys that are cut short", vb_id=vb_id, node=node)
        at += size[1]
        keys.append(packed[at : at + size[0]])
        at += size[0]
    return keys
