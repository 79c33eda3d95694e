"""A member of a living group: members join and leave by themselves, and share the partitions.

    async with GroupMember("127.0.0.1:11210", "billing") as member:
        await member.run(begin, take)

The server has the group's members and its epoch. A member beats; one that dies is taken out when
its lease ends, and the others take its partitions over. With each change of the members an epoch
begins, and every member begins again with its share of the partitions.

A member that stands still may not know yet that its epoch is gone. So `begin(share)` fences: it
marks the share's partitions with the epoch where the effects are stored, in the transaction that
reads their positions, and `take(share, delivery)` must not go through with an older epoch than
theirs (docs/consumers.md#groups-that-live). Nothing of a share follows one that was refused: that
would leave a gap in the partitions that the member keeps.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Final, NamedTuple

from clients.address import ServerAddress
from clients.consumer.batch_reader import Delivery
from clients.consumer.consumer import Consumer
from clients.consumer.options import ConsumerOptions, options_of
from clients.errors import (
    TRANSIENT,
    AmbiguousWriteError,
    DcpdError,
    EpochGoneError,
    OperationTimeoutError,
)
from clients.kv.client import KvClient
from clients.operation import Document
from clients.position import Position
from dcp.wire.opcode import Opcode
from vbucket.model.consumer_documents import GROUP_PREFIX

LEASE_S: Final = 1.2
"""A member that dies is out after this, and the others know one beat later: 1.5 s together."""
BEATS_PER_LEASE: Final = 4
REOPEN_S: Final = 0.5
"""Pause before a member that could not begin with its share tries again."""
_log: Final = logging.getLogger("dcpd.consumer")


class Share(NamedTuple):
    """A member's part of the partitions, from one change of the group to the next."""

    epoch: int
    """It rises with each change of the members."""
    vbuckets: tuple[int, ...]
    members: tuple[str, ...]
    """Their names, in the order in which they joined."""


Begin = Callable[[Share], Awaitable[Mapping[int, Position]] | Mapping[int, Position]]
Take = Callable[[Share, Delivery], Awaitable[None] | None]


class GroupMember:
    """See the module. `name` is the group's; `options` are those of the member's consumers."""

    def __init__(
        self,
        server: str | ServerAddress,
        name: str,
        options: ConsumerOptions | None = None,
        *,
        lease_s: float = LEASE_S,
    ) -> None:
        self._server = server
        self._key = GROUP_PREFIX + name.encode()
        self._options = options
        self._lease_s = lease_s
        self.member = secrets.token_hex(8)
        """Its own name in the group."""
        self.share: Share | None = None
        """None: it does not know, because the server has not answered for a lease."""
        self._changed = asyncio.Event()
        """Replaced with each change of the share."""
        self._kv: KvClient | None = None
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> GroupMember:
        """Join. Raises DcpdError."""
        self._kv = await KvClient.open(self._server)
        try:
            await self._beat()
        except DcpdError:
            await self._kv.close()
            raise
        self._beating = asyncio.get_running_loop().create_task(self._beat_always())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave, so that the others take over at once."""
        assert self._kv is not None
        assert self._beating is not None
        self._beating.cancel()
        with suppress(asyncio.CancelledError):
            await self._beating
        try:
            await self._beat(leaves=True)
        except DcpdError as failure:
            _log.warning("the group was not told that a member leaves: %s", failure)
        await self._kv.close()

    async def run(self, begin: Begin, take: Take) -> None:
        """Follow the member's share for ever; with `until_now`, to its end. Both functions may be
        async, and raise EpochGoneError if a later epoch has one of the share's partitions: the next
        share is waited for then.

        `begin(share)` is called first with each share: it fences older epochs, and returns the
        stored positions. `take(share, delivery)` stores effects and positions together. While a
        partition of the share has no master, the member tries again, `begin` too; with
        `give_up_after_s` for that long.
        """
        failing_since_s: float | None = None
        while True:
            share, changed = self.share, self._changed
            if share is None or not share.vbuckets:
                await changed.wait()
                continue
            try:
                found = begin(share)
                start = await found if inspect.isawaitable(found) else found
            except EpochGoneError:
                await changed.wait()
                continue
            options = options_of(self._options, {"vbuckets": share.vbuckets, "start": start})
            consumer = Consumer(self._server, options)
            try:
                await consumer.open()
            except TRANSIENT as error:
                failing_since_s = failing_since_s or time.monotonic()
                give_up_s = options.give_up_after_s
                if give_up_s is not None and time.monotonic() - failing_since_s > give_up_s:
                    raise
                _log.warning("a member cannot begin with its share yet: %s", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), REOPEN_S)
                continue
            failing_since_s = None
            try:
                async with consumer, aclosing(_until(changed, consumer.deliveries())) as coming:
                    async for delivery in coming:
                        taken = take(share, delivery)
                        if inspect.isawaitable(taken):
                            await taken
            except EpochGoneError as error:
                _log.info("nothing more of the group's epoch %d is taken: %s", share.epoch, error)
                await changed.wait()
            if not changed.is_set():
                return  # with until_now

    async def _beat_always(self) -> None:
        heard_s = time.monotonic()
        while True:
            await asyncio.sleep(self._lease_s / BEATS_PER_LEASE)
            try:
                await self._beat()
                heard_s = time.monotonic()
            except DcpdError as error:
                if time.monotonic() - heard_s > self._lease_s and self.share is not None:
                    _log.warning("the group's server does not answer: %s", error)
                    self._take(None)

    async def _beat(self, *, leaves: bool = False) -> None:
        assert self._kv is not None
        value = {"member": self.member, "lease_ms": int(self._lease_s * 1000), "leaves": leaves}
        operation = (Opcode.X_GROUP_BEAT, self._key, b"", json.dumps(value).encode(), 0)
        (found,) = await self._kv.execute([operation], timeout_s=self._lease_s)
        if isinstance(found, AmbiguousWriteError):  # two beats are like one
            raise OperationTimeoutError(
                f"the group's server did not answer a beat within {self._lease_s:g} s: {found}",
                hint="Try again: while the group's partition gets another master, none answers.",
            ) from found
        if isinstance(found, DcpdError):
            raise found
        assert isinstance(found, Document)
        group = json.loads(found.value)
        self._take(Share(group["epoch"], tuple(group["vbuckets"]), tuple(group["members"])))

    def _take(self, share: Share | None) -> None:
        if share != self.share:
            self.share = share
            self._changed.set()
            self._changed = asyncio.Event()


async def _until(
    changed: asyncio.Event, source: AsyncIterator[Delivery]
) -> AsyncGenerator[Delivery]:
    """Yield what comes until the event is set."""
    ends = asyncio.ensure_future(changed.wait())
    coming: asyncio.Future[Delivery] | None = None
    try:
        while True:
            coming = asyncio.ensure_future(anext(source))
            await asyncio.wait({coming, ends}, return_when=asyncio.FIRST_COMPLETED)
            if ends.done():
                return
            try:
                delivery = coming.result()
            except StopAsyncIteration:
                return
            yield delivery
    finally:
        ends.cancel()
        if coming is not None and not coming.done():
            coming.cancel()
            with suppress(asyncio.CancelledError, StopAsyncIteration):
                await coming
