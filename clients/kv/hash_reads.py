"""Asks servers for hashes, keys and documents of a collection (X_READ_HASHES).

Partitions are asked at the nodes that serve them. While masters move, or a node cannot answer now,
a newer map is fetched and what is left is asked again, until nothing has come for the whole of the
timeout.

Invariant: an answer that cannot be right (cut short, of other buckets) ends the comparison with an
error that names the node.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeVar

from clients.address import ServerAddress
from clients.errors import (
    ConnectError,
    ConnectionLostError,
    InvalidRequestError,
    OperationTimeoutError,
    TopologyError,
    UnsupportedError,
    error_from_status,
)
from clients.kv.call import RETRY_STATUSES
from clients.kv.differences import (
    PARTITIONS_AT_ONCE,
    Comparison,
    Copy,
    Difference,
    Differing,
    Known,
    Wanted,
    partitions_of,
)
from clients.link.handshake import FEATURES
from clients.link.pipelined_link import Link
from clients.link.topology import ClusterMap, ClusterNode, Place
from clients.operation import parsed
from clients.position import Position, may_be_longer, version_log_group, versions_of
from dcp.wire.frame import Frame, pack_request
from dcp.wire.hash_reads import (
    ASKED,
    BUCKET,
    SEQNO,
    SEQNOS_MAX,
    KeyVersion,
    SentDocument,
    Told,
    What,
    buckets_in,
    documents_in,
    told,
    versions_in,
)
from dcp.wire.message import parse_failover_log
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from vbucket.native.key_hashes import KeyHashes

_T = TypeVar("_T")

AGAIN_S: Final = 0.1
GROUPS_AT_ONCE: Final = 2
"""Groups of PARTITIONS_AT_ONCE that are under way, so that one side works while the other does."""
_FROM_FIRST: Final[Mapping[int, bytes]] = MappingProxyType({})
_LATER: Final = frozenset({Status.NOT_MY_VBUCKET, *RETRY_STATUSES})
_UNKNOWN: Final = frozenset({Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED})


class Level(NamedTuple):
    """The hashes of a partition as of a seqno of a version."""

    vb_uuid: int
    seqno: int
    hashes: KeyHashes


class Keys(NamedTuple):
    """Keys of a partition. They came in parts, each as of its own seqno: `seqno` is the highest."""

    seqno: int
    versions: list[KeyVersion]


class _Request(NamedTuple):
    vb_id: int
    what: What
    bits: int = 0
    key: bytes = b""
    value: bytes = b""


class HashReader(Copy):
    """Reads one collection of a server or cluster. Close it when done."""

    def __init__(self, seed: Link, timeout_s: float) -> None:
        self._links = {seed.place: seed}
        self._address = seed.address
        self._timeout_s = timeout_s
        self._dialing = asyncio.Lock()
        self._cluster = ClusterMap([ClusterNode(*seed.place)], is_tls=seed.address.is_tls)
        self._cluster.adopt(seed.topology())
        self.name = seed.address.node
        self.num_vbuckets = seed.topology().num_vbuckets
        self.collection_id = 0
        self.compares = True
        """Until a server says that it cannot: an older one."""
        self.received_bytes = 0
        """Of the answers."""

    @classmethod
    async def open(cls, address: ServerAddress, timeout_s: float = 10.0) -> HashReader:
        """Connect. Raises ConnectError, AuthenticationError, OperationTimeoutError."""
        return cls(await Link.connect(address, timeout_s=timeout_s, features=FEATURES), timeout_s)

    def select(self, collection_id: int) -> None:
        """Read this collection."""
        self.collection_id = collection_id

    async def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    async def collections(self) -> dict[str, int]:
        """Return the collections of the server: scope.collection -> id."""
        link = next(iter(self._links.values()))
        frame = await self._in_time(link.request(Opcode.GET_COLLECTIONS_MANIFEST), link.node)
        if frame.status:
            what = "get collections"
            raise error_from_status(frame.status, what, body=frame.value, node=link.node)
        document: dict[str, Any] = json.loads(frame.value)
        return {
            f"{scope['name']}.{each['name']}": int(each["uid"], 16)
            for scope in document["scopes"]
            for each in scope["collections"]
        }

    async def levels(self, vb_ids: Sequence[int], bits: int) -> dict[int, Level]:
        """Return the hashes of partitions with the seqnos that they belong to."""
        answers = await self._asked([_Request(vb_id, What.HASHES, bits) for vb_id in vb_ids])
        found = {}
        for vb_id, (facts, value, node) in answers.items():
            try:
                table = KeyHashes(facts.bits, facts.documents, value)
            except ValueError as error:
                raise ConnectError(f"hashes: {error}", vb_id=vb_id, node=node) from error
            found[vb_id] = Level(facts.vb_uuid, facts.seqno, table)
        return found

    async def hashes(self, vb_ids: Sequence[int], bits: int) -> dict[int, KeyHashes]:
        """See Copy."""
        found = {}
        for at in range(0, len(vb_ids), PARTITIONS_AT_ONCE):
            levels = await self.levels(vb_ids[at : at + PARTITIONS_AT_ONCE], bits)
            found.update({vb_id: level.hashes for vb_id, level in levels.items()})
        return found

    async def versions(self, wanted: Wanted, known: Known) -> dict[int, list[KeyVersion]]:  # noqa: ARG002
        """See Copy."""
        return {vb_id: keys.versions for vb_id, keys in (await self.keys(wanted)).items()}

    async def differing(self, tables: Mapping[int, KeyHashes]) -> dict[int, Differing]:
        """See Copy."""
        if not self.compares:
            return await super().differing(tables)
        requests = [
            _Request(vb_id, What.DIFFERING, table.bits, value=bytes(table.sums))
            for vb_id, table in tables.items()
        ]
        try:
            answers = await self._asked(requests)
        except InvalidRequestError:
            self.compares = False
            return await super().differing(tables)
        found: dict[int, Differing] = {}
        firsts: dict[int, bytes] = {}
        for vb_id, (facts, value, node) in answers.items():
            try:
                buckets, keys = buckets_in(value, facts.bits, tables[vb_id].bits)
                versions = versions_in(keys)
            except ValueError as error:
                raise ConnectError(f"what differs: {error}", vb_id=vb_id, node=node) from error
            if any(buckets):
                found[vb_id] = Differing(facts.bits, buckets, versions)
            if facts.has_more:
                if vb_id not in found or not versions:
                    raise ConnectError("what differs: an endless answer", vb_id=vb_id, node=node)
                firsts[vb_id] = versions[-1].key + b"\0"
        if firsts:
            wanted = {vb_id: (found[vb_id].bits, found[vb_id].buckets) for vb_id in firsts}
            for vb_id, rest in (await self.keys(wanted, firsts)).items():
                found[vb_id].versions.extend(rest.versions)
        return found

    async def keys(
        self, wanted: Wanted, firsts: Mapping[int, bytes] = _FROM_FIRST
    ) -> dict[int, Keys]:
        """Return the keys of buckets with the seqnos that they belong to. `firsts`: partition ->
        the logical key to begin at.
        """
        found = {vb_id: Keys(0, []) for vb_id in wanted}
        firsts = {vb_id: firsts.get(vb_id, b"") for vb_id in wanted}
        while firsts:
            requests = [
                _Request(vb_id, What.KEYS, wanted[vb_id][0], first, _numbers_of(wanted[vb_id][1]))
                for vb_id, first in firsts.items()
            ]
            firsts = {}
            for vb_id, (facts, value, node) in (await self._asked(requests)).items():
                part = found[vb_id]
                try:
                    part.versions.extend(versions_in(value))
                except ValueError as error:
                    raise ConnectError(f"keys: {error}", vb_id=vb_id, node=node) from error
                if facts.has_more and not value:
                    raise ConnectError("keys: an endless answer", vb_id=vb_id, node=node)
                found[vb_id] = part._replace(seqno=max(part.seqno, facts.seqno))
                if facts.has_more:
                    firsts[vb_id] = part.versions[-1].key + b"\0"
        return found

    async def documents(self, wanted: Mapping[int, Sequence[int]]) -> dict[int, list[SentDocument]]:
        """Return the documents of partitions with these seqnos that are still there."""
        left = {vb_id: list(seqnos) for vb_id, seqnos in wanted.items() if seqnos}
        found: dict[int, list[SentDocument]] = {vb_id: [] for vb_id in left}
        while left:
            requests = [
                _Request(
                    vb_id, What.DOCUMENTS, value=b"".join(map(SEQNO.pack, seqnos[:SEQNOS_MAX]))
                )
                for vb_id, seqnos in left.items()
            ]
            for vb_id, (facts, value, node) in (await self._asked(requests)).items():
                try:
                    documents = documents_in(value)
                except ValueError as error:
                    raise ConnectError(f"documents: {error}", vb_id=vb_id, node=node) from error
                found[vb_id] += documents
                some, rest = left[vb_id][:SEQNOS_MAX], left[vb_id][SEQNOS_MAX:]
                if facts.has_more and documents:
                    last = documents[-1].version.seqno
                    rest = some[some.index(last) + 1 if last in some else len(some) :] + rest
                left[vb_id] = rest
            left = {vb_id: rest for vb_id, rest in left.items() if rest}
        return found

    async def links_of(self, vb_ids: Iterable[int]) -> list[tuple[Link, list[int]]]:
        """Return a connection to each node of partitions. Raises TopologyError, ConnectError."""
        assert self._cluster.topology is not None, "it came with the first connection"
        groups, without = self._cluster.topology.by_place(vb_ids)
        for error in without.values():
            raise error
        return [(await self._link_to(place), members) for place, members in groups.items()]

    # -- asking --------------------------------------------------------------------------------

    async def _asked(self, requests: list[_Request]) -> dict[int, tuple[Told, bytes, str]]:
        """Return the answers by partition, each with the node that gave it."""
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + self._timeout_s
        left = {request.vb_id: request for request in requests}
        found: dict[int, tuple[Told, bytes, str]] = {}
        while True:
            assert self._cluster.topology is not None, "it came with the first connection"
            groups, without = self._cluster.topology.by_place(left)
            refusal: Exception | None = next(iter(without.values()), None)
            for place, vb_ids in groups.items():
                try:
                    link = await self._link_to(place)
                    frames = await self._sent(link, [left[vb_id] for vb_id in vb_ids])
                except (ConnectError, ConnectionLostError) as error:
                    refusal = error
                    continue
                for vb_id, frame in zip(vb_ids, frames, strict=True):
                    if frame.status:
                        refusal = self._refused(frame, vb_id, link.node)
                        continue
                    found[vb_id] = _facts_of(frame, vb_id, link.node)
                    del left[vb_id]
                    give_up_s = loop.time() + self._timeout_s
            if not left:
                return found
            assert refusal is not None, "what is left was refused"
            if loop.time() >= give_up_s:
                raise refusal
            await asyncio.sleep(AGAIN_S)
            await self._refresh()

    async def _sent(self, link: Link, requests: list[_Request]) -> list[Frame]:
        opaque = link.take_opaques(len(requests))
        packets = b"".join(
            pack_request(
                Opcode.X_READ_HASHES, vb_id=each.vb_id, opaque=opaque + at & 0xFFFF_FFFF,
                extras=ASKED.pack(each.what, each.bits, self.collection_id),
                key=each.key, value=each.value,
            )
            for at, each in enumerate(requests)
        )  # fmt: skip
        frames = await self._in_time(link.send_batch(packets, opaque, len(requests)), link.node)
        self.received_bytes += sum(24 + len(frame.extras) + len(frame.value) for frame in frames)
        return frames

    async def _in_time(self, answer: Awaitable[_T], node: str) -> _T:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await answer
        except TimeoutError:
            why = f"read hashes: no answer within {self._timeout_s:g} s"
            raise OperationTimeoutError(why, node=node) from None

    async def _link_to(self, place: Place) -> Link:
        async with self._dialing:  # groups that are read at a time share a connection
            link = self._links.get(place)
            if link is None or link.is_closed:
                address = self._address.at(*place)
                link = await Link.connect(address, timeout_s=self._timeout_s, features=FEATURES)
                self._links[place] = link
            return link

    def _refused(self, frame: Frame, vb_id: int, node: str) -> Exception:
        """Return a refusal that says "later". Raises every other one."""
        if frame.status in _UNKNOWN:
            raise UnsupportedError("the server has no hashes (X_READ_HASHES)", node=node)
        error = error_from_status(
            frame.status, "read hashes", body=frame.value, vb_id=vb_id, node=node
        )
        if frame.status not in _LATER:
            raise error
        return error

    async def _refresh(self) -> None:
        """Take the newest map that a node knows. With none, the known one is tried again."""
        for place in tuple(self._links):
            try:
                link = await self._link_to(place)
                frame = await self._in_time(link.request(Opcode.GET_CLUSTER_CONFIG), link.node)
                if not frame.status and frame.value:
                    self._cluster.learn(frame.value, link.address.host)
            except (ConnectError, ConnectionLostError, OperationTimeoutError, TopologyError):
                continue


async def differences(first: Copy, second: Copy) -> AsyncGenerator[list[Difference]]:
    """Yield the keys that differ, in the order of partitions and keys. Raises NotComparableError,
    and what reading raises. Who does not read to the end closes it before the copies.
    """
    count = partitions_of(first, second)
    comparison = Comparison(first, second)
    running: deque[asyncio.Task[list[list[Difference]]]] = deque()
    try:
        for start in range(0, count, PARTITIONS_AT_ONCE):
            vb_ids = range(start, min(start + PARTITIONS_AT_ONCE, count))
            running.append(asyncio.create_task(comparison.of_group(vb_ids)))
            if len(running) == GROUPS_AT_ONCE:
                for found in await running.popleft():
                    yield found
        while running:
            for found in await running.popleft():
                yield found
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def positions_at(link: Link, seqnos: Mapping[int, int]) -> dict[int, Position]:
    """Return positions at the given seqnos in the partitions' current histories.

    Raises TopologyError if the node does not serve a partition, StatusError, ConnectError.
    """
    wanted = {vb_id: seqno for vb_id, seqno in seqnos.items() if seqno}
    positions = dict.fromkeys(seqnos, Position())
    if not wanted:
        return positions
    opaque = link.take_opaques(len(wanted))
    packet = b"".join(
        pack_request(Opcode.GET_FAILOVER_LOG, vb_id=vb_id, opaque=opaque + index)
        for index, vb_id in enumerate(wanted)
    )
    frames = await link.send_batch(packet, opaque, len(wanted))
    for (vb_id, seqno), frame in zip(wanted.items(), frames, strict=True):
        if frame.status == Status.NOT_MY_VBUCKET:
            raise TopologyError("the partition has moved", vb_id=vb_id, node=link.node)
        if frame.status:
            raise error_from_status(
                frame.status, "get failover log", body=frame.value, vb_id=vb_id, node=link.node
            )
        log = parsed(parse_failover_log, frame.value, link.node)
        if may_be_longer(log) and log[-1][1] > seqno:
            answer = await link.request_stat(version_log_group(vb_id))
            log = list(versions_of(answer, vb_id)) or log
        versions = tuple(version for version in log if version[1] <= seqno)
        if versions:
            positions[vb_id] = Position(versions, seqno, seqno, seqno, base_seqno=seqno)
    return positions


def _numbers_of(buckets: bytes) -> bytes:
    return b"".join(BUCKET.pack(at) for at, is_wanted in enumerate(buckets) if is_wanted)


def _facts_of(frame: Frame, vb_id: int, node: str) -> tuple[Told, bytes, str]:
    try:
        return told(frame), frame.value, node
    except ValueError as error:
        raise ConnectError(f"read hashes: {error}", vb_id=vb_id, node=node) from error
