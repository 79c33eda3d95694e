"""The connections of a restore: loads go out, answers come back.

Invariants
- answers come in the order of loads. A load sent as single requests ends with a NOOP. Its answer
  means that everything before it is done, with the server's durability;
- per node at most UNDER_WAY_BYTES_MAX and LOADS_MAX are pending, but always one load may be;
- a server with X_FIT_META replaces a CAS that is too far ahead of its clock. These are counted;
- temporary refusals are sent again. A packet that was refused as a whole is sent again as single
  requests. Other refusals are counted by status, with the first error of each.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable
from typing import Final

from clients.backup.restore_load import (
    FRAMES_BYTES_MAX,
    Load,
    cas_of,
    frames_of_load,
    load_of,
    packet,
    single_packets,
)
from clients.backup.run import PUSH_FEATURES
from clients.errors import (
    TEMPORARY_STATUSES,
    ConnectionLostError,
    DcpdError,
    OperationTimeoutError,
    TemporaryError,
    error_from_status,
)
from clients.link.dials import Dials
from clients.link.pipelined_link import Link
from clients.link.topology import Place
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER, HEADER_BYTES, pack_request
from dcp.wire.message import (
    FIT_META,
    PUT_FRAMES_ANSWER,
    PUT_FRAMES_FITTED_ANSWER,
    PUT_FRAMES_REFUSED,
)
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

RESTORE_FEATURES: Final[tuple[int, ...]] = (
    *PUSH_FEATURES, Feature.X_PUT_FRAMES, Feature.X_FIT_META,
)  # fmt: skip
"""Features that a restore asks for."""
UNDER_WAY_BYTES_MAX: Final = 16 * 1024 * 1024
"""Pending bytes per node. The server syncs its log in groups; with fewer pending bytes it would
wait for us after each group."""
LOADS_MAX: Final = 1024
"""Pending loads per node. This limit applies to small loads."""
RETRY_PAUSE_S: Final = 0.2
RETRIES_MAX: Final = 50
"""Attempts for temporarily refused items: about 10 s."""
ANSWER_TIMEOUT_S: Final = 60.0
"""How long a node may neither answer nor read. A slow disk needs far less."""
NOOP_OPAQUE: Final = 0xFFFF_FFFF

_RETRIED: Final = TEMPORARY_STATUSES | {Status.NOT_MY_VBUCKET}
_FATAL: Final = frozenset({Status.EACCESS, Status.UNKNOWN_COMMAND, Status.NOT_SUPPORTED})
_NEVER_WHOLE: Final = _FATAL
"""Statuses that every packet of many frames would get. After one of them, none is sent."""
_NOOP: Final = pack_request(Opcode.NOOP, opaque=NOOP_OPAQUE)


class _LoadBatch:
    """A pending load. `is_whole`: sent as one packet. Otherwise an item's opaque is its index."""

    __slots__ = ("cas", "is_whole", "load", "retried")

    def __init__(self, load: Load, *, is_whole: bool) -> None:
        self.load = load
        self.cas: list[int] = [] if is_whole else list(map(cas_of, frames_of_load(load)))
        self.is_whole = is_whole
        self.retried: list[int] = []


class RestoreWriter:
    """Sends loads to the nodes of their partitions, and counts the answers."""

    def __init__(
        self,
        dials: Dials,
        options: int,
        *,
        retry_pause_s: float = RETRY_PAUSE_S,
        answer_timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.kept_newer = 0
        self.replaced_cas = 0
        """Documents and deletions that got a new CAS from the server."""
        self.refused: Counter[int] = Counter()
        self.examples: dict[int, str] = {}
        self.options = options
        self.answer_timeout_s = answer_timeout_s
        self._retry_pause_s = retry_pause_s
        self._dials = dials
        self._channels: dict[Place, _Channel] = {}
        self._again: list[Load] = []
        """Items with a temporary refusal, to be sent again."""
        self._singly: list[Load] = []
        """Loads that were refused as one packet, to be sent as single requests."""
        self._failure: DcpdError | None = None

    async def send(self, load: Load, *, may_be_whole: bool = True) -> None:
        """Send a load; wait while too much is pending."""
        channel = await self._channel(load.vb_id)
        while channel.is_full and self._failure is None:
            await channel.wait()
        self._check()
        channel.send(load, may_be_whole=may_be_whole)
        await channel.drain()
        await asyncio.sleep(0)  # let the transport send; the caller may use the CPU for long

    async def finish(self) -> None:
        """Wait until everything is answered; send temporarily refused items again."""
        for _ in range(RETRIES_MAX):
            await self._settle()
            while self._singly:
                singly, self._singly = self._singly, []
                for load in singly:
                    await self.send(load, may_be_whole=False)
                await self._settle()
            if not self._again:
                return
            await asyncio.sleep(self._retry_pause_s)
            (await self._dials.refreshed_link()).close()
            again, self._again = self._again, []
            for load in again:
                await self.send(load)
        raise TemporaryError(
            f"the server refused {sum(load.changes for load in self._again)} documents in "
            f"{RETRIES_MAX} attempts",
            node=self._dials.node, hint="Check the server with dcpctl status, then run again.",
        )  # fmt: skip

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            channel.link.close()
        await asyncio.sleep(0)  # lets the transports finish closing

    # -- called by channels ----------------------------------------------------------------------

    def refuse(self, batch: _LoadBatch, status: int, index: int, body: bytes, node: str) -> None:
        """A single request was refused, or a frame in a packet."""
        if status == Status.KEY_EEXISTS:
            self.kept_newer += 1
        elif status in _RETRIED:
            batch.retried.append(index)
        else:
            self.refused[status] += 1
            error = error_from_status(
                status, "restore of a document", body=body, vb_id=batch.load.vb_id, node=node
            )
            self.examples.setdefault(status, str(error))
            if status in _FATAL and self._failure is None:
                self._failure = error

    def refuse_whole(self, batch: _LoadBatch, status: int) -> None:
        """A packet was refused, and none of it applied."""
        (self._again if status in _RETRIED else self._singly).append(batch.load)

    def done(self, batch: _LoadBatch) -> None:
        """A load is completely answered."""
        if batch.retried:
            frames = frames_of_load(batch.load)
            chosen = [frames[at] for at in batch.retried]
            self._again.append(load_of(batch.load.vb_id, chosen))

    def fail(self, error: DcpdError) -> None:
        """A connection failed."""
        if self._failure is None:
            self._failure = error

    # -- inside ----------------------------------------------------------------------------------

    async def _settle(self) -> None:
        for channel in self._channels.values():
            while channel.batches and self._failure is None:
                await channel.wait()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            if isinstance(self._failure, ConnectionLostError | OperationTimeoutError):
                self._failure.hint = (
                    "Check the server with dcpctl status, then run the restore again. Documents"
                    " that are already restored are kept."
                )
            raise self._failure

    async def _channel(self, vb_id: int) -> _Channel:
        """Return the connection to a partition's node."""
        topology = self._dials.cluster.topology
        assert topology is not None
        place = topology.node_of(vb_id).place
        channel = self._channels.get(place)
        if channel is None:
            link = await self._dials.connect(place)
            channel = self._channels[place] = _Channel(self, link)
        return channel


class _Channel:
    """One node's connection: loads under way, oldest first."""

    def __init__(self, writer: RestoreWriter, link: Link) -> None:
        self.link = link
        self.batches: deque[_LoadBatch] = deque()
        assert link.handshake is not None
        self._takes_whole = Feature.X_PUT_FRAMES in link.handshake.features
        self._fits = FIT_META if Feature.X_FIT_META in link.handshake.features else 0
        self._under_way_bytes = 0
        self._writer = writer
        self._rest = b""
        self._wake = asyncio.Event()
        link.hand_over(self._on_bytes, self._on_lost)

    @property
    def is_full(self) -> bool:
        """Whether the next load must wait."""
        return self._under_way_bytes >= UNDER_WAY_BYTES_MAX or len(self.batches) >= LOADS_MAX

    def send(self, load: Load, *, may_be_whole: bool) -> None:
        """Send a load."""
        options = self._writer.options | self._fits
        is_small = len(load.frames) <= FRAMES_BYTES_MAX
        is_whole = may_be_whole and self._takes_whole and is_small
        if is_whole:
            self.link.write(packet(load, options))
        else:
            self.link.write(b"".join((*single_packets(load, options), _NOOP)))
        self.batches.append(_LoadBatch(load, is_whole=is_whole))
        self._under_way_bytes += len(load.frames)

    async def wait(self) -> None:
        """Wait for an answer, or until the connection fails."""
        self._wake.clear()
        await self._in_time(self._wake.wait())

    async def drain(self) -> None:
        """Wait until the node reads more bytes, or the connection fails."""
        await self._in_time(self.link.drain())

    async def _in_time(self, happens: Awaitable[object]) -> None:
        timeout_s = self._writer.answer_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await happens
        except TimeoutError:
            changes = sum(batch.load.changes for batch in self.batches)
            self._writer.fail(
                OperationTimeoutError(
                    f"the server did not answer for {timeout_s:g} s, and {changes} documents"
                    " are pending",
                    node=self.link.node,
                )
            )

    def _on_bytes(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            _, opcode, key_len, extras_len, _, status, body, opaque, cas = HEADER.unpack_from(
                data, at
            )
            stop = at + HEADER_BYTES + body
            if stop > end:
                break
            if self.batches:
                extras_at = at + HEADER_BYTES
                value = data[extras_at + extras_len + key_len : stop]
                if self.batches[0].is_whole:
                    self._take_whole(status, data[extras_at : extras_at + extras_len], value)
                elif opcode == Opcode.NOOP:
                    self._done()
                elif status:
                    batch, node = self.batches[0], self.link.node
                    self._writer.refuse(batch, status, opaque, value, node)
                else:
                    self._writer.replaced_cas += cas != self.batches[0].cas[opaque]
            at = stop
        self._rest = data[at:]

    def _take_whole(self, status: int, extras: bytes, value: bytes) -> None:
        """Process the answer to a packet of many frames."""
        batch, writer = self.batches[0], self._writer
        if status:
            writer.refuse_whole(batch, status)
            self._takes_whole = self._takes_whole and status not in _NEVER_WHOLE
        else:
            answer = PUT_FRAMES_FITTED_ANSWER if self._fits else PUT_FRAMES_ANSWER
            _, kept, *replaced = answer.unpack(extras)
            writer.kept_newer += kept
            writer.replaced_cas += sum(replaced)
            for index, why in PUT_FRAMES_REFUSED.iter_unpack(value):
                writer.refuse(batch, why, index, b"", self.link.node)
        self._done()

    def _done(self) -> None:
        batch = self.batches.popleft()
        self._under_way_bytes -= len(batch.load.frames)
        self._writer.done(batch)
        self._wake.set()

    def _on_lost(self, error: DcpdError) -> None:
        self._writer.fail(error)
        self._wake.set()
