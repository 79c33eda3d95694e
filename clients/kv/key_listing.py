"""Lists keys with range scans: the keys of each partition as of one moment, without the values.

A node is asked for some partitions at a time: create their scans, then take their next keys until
there are no more. The server drops a scan that is not read to its end when the connection closes.

While masters move, a node may refuse a partition, drop its scan or go away. Then the listing asks
for a newer map, and goes on behind the last key that it had of that partition. So keys of such a
partition are of two moments. It gives up when nothing has come for the whole of the timeout.

Invariant: every key of a partition is listed once, by a node that serves it, or the listing ends
with an error. So a listing is complete or fails.
"""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from struct import Struct
from typing import Final, NamedTuple

from clients.address import ServerAddress
from clients.errors import (
    TRANSIENT,
    ConnectError,
    ConnectionLostError,
    OperationTimeoutError,
    TemporaryError,
    UnsupportedError,
    error_from_status,
)
from clients.kv.call import RETRY_STATUSES
from clients.link.handshake import FEATURES
from clients.link.pipelined_link import Link
from clients.link.topology import ClusterMap, ClusterNode, Place, Topology
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
KEYS_AT_ONCE: Final = 0
"""Most keys of one answer for a partition; 0: the server decides."""
AGAIN_S: Final = 0.2
"""The pause before partitions that were refused are asked for again."""
_NOT_CREATED_NOW: Final = frozenset({Status.NOT_MY_VBUCKET, *RETRY_STATUSES})
"""Refusals of a partition that moves, or of a node that cannot do it now."""
_SCAN_IS_GONE: Final = _NOT_CREATED_NOW | {Status.KEY_ENOENT, Status.RANGE_SCAN_CANCELLED}
"""Another node serves the partition now, or the server has dropped the scan."""
_GOES_ON: Final = frozenset({Status.RANGE_SCAN_MORE, Status.RANGE_SCAN_COMPLETE})


async def list_keys(
    address: ServerAddress,
    prefix: bytes = b"",
    *,
    collection: str | None = None,
    timeout_s: float = 10.0,
) -> AsyncIterator[list[bytes]]:
    """Yield the keys that begin with a prefix, in lists; the lists are in no order.

    `timeout_s` bounds each answer, and the time without any progress. Raises ConnectError,
    OperationTimeoutError, TopologyError, UnknownCollectionError, NoAccessError and other
    StatusErrors.
    """
    listing = _KeyScans(await _connect(address, timeout_s), timeout_s)
    try:
        await listing.begin(prefix, collection)
        async for keys in listing.keys():
            yield keys
    finally:
        listing.close()
        await asyncio.sleep(0)  # lets the transports finish closing


class _KeyScans:
    """The scans of one listing, over a connection to each node."""

    def __init__(self, seed: Link, timeout_s: float) -> None:
        self._links = {seed.place: seed}
        self._address = seed.address
        self._timeout_s = timeout_s
        self._cluster = ClusterMap([ClusterNode(*seed.place)], is_tls=seed.address.is_tls)
        self._cluster.adopt(seed.topology())
        self._ranges = _Ranges(0, b"")
        self._left: dict[int, bytes] = dict.fromkeys(range(self._known.num_vbuckets), b"")
        """Partitions that are not listed to their end, and the last key of each; b"": none yet."""
        self._refusal: Exception | None = None
        """The last one that says "later"."""
        self._give_up_s = 0.0
        self._note_progress()

    async def begin(self, prefix: bytes, collection: str | None) -> None:
        """Look the collection up; a node that starts may refuse that for a while."""
        (place,) = self._links
        while True:
            try:
                seed = await self._link_to(place)
                self._ranges = await _ranges_of(seed, prefix, collection, self._timeout_s)
            except (ConnectionLostError, TemporaryError):
                if asyncio.get_running_loop().time() >= self._give_up_s:
                    raise
                await asyncio.sleep(AGAIN_S)
            else:
                return

    async def keys(self) -> AsyncIterator[list[bytes]]:
        """Yield keys until all partitions are listed."""
        loop = asyncio.get_running_loop()
        while True:
            for place, vb_ids in self._by_place().items():
                for at in range(0, len(vb_ids), PARTITIONS_AT_ONCE):
                    async for found in self._listed(place, vb_ids[at : at + PARTITIONS_AT_ONCE]):
                        yield found
            if not self._left:
                return
            assert self._refusal is not None, "what is left was refused"
            if loop.time() >= self._give_up_s:
                raise self._refusal
            await asyncio.sleep(AGAIN_S)
            await self._refresh()

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()

    @property
    def _known(self) -> Topology:
        assert self._cluster.topology is not None, "it came with the first connection"
        return self._cluster.topology

    def _note_progress(self) -> None:
        self._give_up_s = asyncio.get_running_loop().time() + self._timeout_s

    def _by_place(self) -> dict[Place, list[int]]:
        """Return the partitions that are left, by the node that has them."""
        found, without = self._known.by_place(self._left)
        self._refusal = next(iter(without.values()), self._refusal)
        return found

    async def _listed(self, place: Place, vb_ids: Sequence[int]) -> AsyncIterator[list[bytes]]:
        """Yield the keys of some partitions of a node. What it refuses for now stays left."""
        try:
            link = await self._link_to(place)
            scans = await self._created(link, vb_ids)
            while scans:
                yield await self._continued(link, scans)
        except (ConnectError, ConnectionLostError) as error:
            self._refusal = error

    async def _link_to(self, place: Place) -> Link:
        """Return a connection to a node. Raises ConnectError."""
        link = self._links.get(place)
        if link is None or link.is_closed:
            address = self._address.at(*place)
            link = self._links[place] = await _connect(address, self._timeout_s)
        return link

    async def _created(self, link: Link, vb_ids: Sequence[int]) -> dict[int, bytes]:
        """Create scans; return their ids by partition. A partition without such a key has none."""
        bodies = {vb_id: self._ranges.request(self._left[vb_id]) for vb_id in vb_ids}
        frames = await _asked(link, Opcode.RANGE_SCAN_CREATE, bodies, self._timeout_s)
        scans: dict[int, bytes] = {}
        for vb_id, frame in zip(vb_ids, frames, strict=True):
            if frame.status == Status.KEY_ENOENT:
                del self._left[vb_id]
                self._note_progress()
            elif frame.status:
                self._refused(frame, _NOT_CREATED_NOW, vb_id, link.node)
            elif len(frame.value) != _SCAN_ID_BYTES:
                raise ConnectError("the id of a scan is cut short", vb_id=vb_id, node=link.node)
            else:
                scans[vb_id] = frame.value
        return scans

    async def _continued(self, link: Link, scans: dict[int, bytes]) -> list[bytes]:
        """Return the next keys of all scans; remove the scans that are complete or dropped."""
        frames = await _asked(link, Opcode.RANGE_SCAN_CONTINUE, scans, self._timeout_s)
        keys: list[bytes] = []
        for vb_id, frame in zip(tuple(scans), frames, strict=True):
            if frame.status not in _GOES_ON:
                self._refused(frame, _SCAN_IS_GONE, vb_id, link.node)
                del scans[vb_id]
                continue
            found = _keys_of(frame.value, vb_id, link.node)
            keys += found
            self._note_progress()
            if frame.status == Status.RANGE_SCAN_COMPLETE:
                del scans[vb_id], self._left[vb_id]
            elif found:
                self._left[vb_id] = found[-1]
        return keys

    def _refused(self, frame: Frame, later: Collection[int], vb_id: int, node: str) -> None:
        """Take note of a refusal. Raises it, unless it says "later"."""
        error = error_from_status(
            frame.status, "list keys", body=frame.value, vb_id=vb_id, node=node
        )
        if frame.status not in later:
            raise error
        self._refusal = error

    async def _refresh(self) -> None:
        """Take the newest map that a node knows. With none, the known one is tried again."""
        for place in tuple(self._links):
            try:
                link = await self._link_to(place)
                (frame,) = await _asked(link, Opcode.GET_CLUSTER_CONFIG, {0: b""}, self._timeout_s)
                if frame.status or not frame.value:
                    continue
                self._cluster.learn(frame.value, link.address.host)
            except TRANSIENT:
                continue


class _Ranges(NamedTuple):
    """What is scanned in each partition."""

    collection_id: int
    prefix: bytes

    def request(self, after: bytes) -> bytes:
        """Return the body of the request that creates a scan, behind this key; b"": all of it."""
        # No key is longer, so this is at or above the last key with the prefix.
        end = self.prefix + b"\xff" * max(1, MAX_KEY_BYTES - len(self.prefix))
        name, start = ("excl_start", after) if after else ("start", self.prefix)
        bounds = {name: b64encode(start).decode(), "end": b64encode(end).decode()}
        return json.dumps(
            {"collection": f"{self.collection_id:x}", "key_only": True, "range": bounds}
        ).encode()


async def _connect(address: ServerAddress, timeout_s: float) -> Link:
    return await Link.connect(address, timeout_s=timeout_s, features=(*FEATURES, Feature.JSON))


async def _ranges_of(
    link: Link, prefix: bytes, collection: str | None, timeout_s: float
) -> _Ranges:
    """Return what is scanned in each partition."""
    if collection is None:
        return _Ranges(0, prefix)
    if not link.has_collections:
        raise UnsupportedError("the server has no collections", node=link.node)
    (frame,) = await _asked(link, Opcode.GET_COLLECTION_ID, {0: collection.encode()}, timeout_s)
    return _Ranges(collection_id_of(frame, collection, link.node), prefix)


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
                extras = _CONTINUE.pack(body, KEYS_AT_ONCE, 0, 0)
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
