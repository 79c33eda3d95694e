"""What clients do while things go wrong, and what they were answered.

    writers     set, read, and compare-and-set few keys, so that they meet (KvClient)
    counters    INCREMENT few keys; never repeated by themselves
    readers     one for each node: GET of any key there, whoever is its master. What is answered
                must be right, also by a node that was frozen or cut off meanwhile
    loader      writes new keys once, all over the partitions

Every answer goes into the history of its key. `linearizable` judges it.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from clients.address import parse_address
from clients.errors import CasMismatchError, DcpdError, NotFoundError
from clients.kv.client import KvClient
from clients.link.pipelined_link import Link
from clients.operation import MutationResult
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from tests.soak.cluster.history import Kind, Operation, Value
from vbucket.model.ids import NUM_VBUCKETS, vbucket_of

WRITERS: Final = 6
COUNTERS: Final = 3
REGISTER_KEYS: Final = [b"register-%d" % number for number in range(24)]
COUNTER_KEYS: Final = [b"counter-%d" % number for number in range(8)]
TIMEOUT_S: Final = 6.0
"""Of an operation of a writer: longer than most failovers."""
COUNTER_TIMEOUT_S: Final = 3.0
READ_EVERY_S: Final = 0.04
READS_OPEN_MAX: Final = 400
"""Reads that a reader has under way at a node: a frozen one answers none for a while."""
LOADED_AT_ONCE: Final = 24
LOAD_EVERY_S: Final = 0.05
REST_S: Final = 0.004
"""Between two operations of a client, so that the nodes have most of the processors."""
_COUNT: Final = struct.Struct(">QQI").pack(1, 1, 0)
"""Add one; begin at one; no expiry."""
_NOT_DONE: Final = frozenset(
    {
        Status.NOT_MY_VBUCKET, Status.ETMPFAIL, Status.EBUSY, Status.DURABILITY_IMPOSSIBLE,
        Status.ENOMEM,
    }
)  # fmt: skip
"""Answers after which nothing has changed."""


class LoadError(Exception):
    """A client met something that must not happen; the text says what."""


class Load:
    """See the module. `begin`, then `stop`; then `histories` has what happened."""

    def __init__(self, kv: KvClient, addresses: Callable[[], dict[str, str]], seed: int) -> None:
        self.histories: dict[bytes, list[Operation]] = {
            key: [] for key in (*REGISTER_KEYS, *COUNTER_KEYS)
        }
        self.loaded: dict[bytes, bytes] = {}
        """Keys that were written once, and answered."""
        self.maybe: dict[bytes, bytes] = {}
        """Keys whose write may have happened."""
        self.loading: dict[bytes, tuple[int, int]] = {}
        """When the write of such a key was called, and when it had returned."""
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self._kv = kv
        self._addresses = addresses
        self._draw = random.Random(seed)
        self._is_over = False
        self._tasks: list[asyncio.Task[None]] = []
        self._reads: set[asyncio.Task[None]] = set()
        self.read_from: set[str] = set()
        """Nodes that have a reader."""
        self._links: dict[tuple[str, int], Link] = {}
        self._serial = 0

    def begin(self) -> None:
        """Start all clients."""
        work = [self._write(f"writer {number}") for number in range(WRITERS)]
        work += [self._count(f"counter {number}") for number in range(COUNTERS)]
        work.append(self._load())
        self._tasks = [asyncio.create_task(each) for each in work]
        for name in self._addresses():
            self.add_reader(name)

    def add_reader(self, name: str) -> None:
        """Read from one more node."""
        self.read_from.add(name)
        self._tasks.append(asyncio.create_task(self._read(name)))

    def check_alive(self) -> None:
        """Raise what ended a client."""
        for task in self._tasks:
            if task.done() and not self._is_over:
                task.result()
                raise LoadError("a client has stopped")

    @property
    def answers(self) -> int:
        """How many operations were answered so far."""
        return self.counts["answered"]

    async def stop(self) -> None:
        """End all clients after what they do now."""
        self._is_over = True
        await asyncio.gather(*self._tasks)
        for task in self._reads:
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)
        for link in self._links.values():
            link.close()

    async def abandon(self) -> None:
        """End all clients at once."""
        self._is_over = True
        tasks = [*self._tasks, *self._reads]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            link.close()

    async def read_all(self) -> None:
        """Read every key at its master, as a part of its history. The cluster must answer."""
        for key in self.histories:
            called_ns = time.monotonic_ns()
            try:
                document = await self._kv.get(key)
                found, cas = _number_or_bytes(key, document.value), document.cas
            except NotFoundError:
                found, cas = None, 0
            self._note(key, Kind.READ, called_ns, found=found, cas=cas, by="at the end")

    # -- registers ---------------------------------------------------------------------------------

    async def _write(self, who: str) -> None:
        acts = {"set": self._set, "get": self._get, "swap": self._swap}
        while not self._is_over:
            act = self._draw.choices(list(acts), (5, 3, 4))[0]
            await acts[act](who, self._draw.choice(REGISTER_KEYS))
            await asyncio.sleep(REST_S)

    def _new_value(self, who: str) -> bytes:
        self._serial += 1
        return f"{who} {self._serial}".encode()

    async def _set(self, who: str, key: bytes) -> None:
        value, called_ns = self._new_value(who), time.monotonic_ns()
        try:
            done = await self._kv.set(key, value)
        except DcpdError as error:
            self._failed(key, Kind.WRITE, called_ns, error, value=value, by=who)
            return
        self._note(key, Kind.WRITE, called_ns, value=value, cas=done.cas, by=who)

    async def _get(self, who: str, key: bytes) -> tuple[Value, int]:
        """Return what a key has, and its CAS; no CAS if there is no answer, or no document."""
        called_ns = time.monotonic_ns()
        try:
            document = await self._kv.get(key)
        except NotFoundError:
            self._note(key, Kind.READ, called_ns, found=None, by=who)
            return None, 0
        except DcpdError as error:
            self._refused(error)
            return None, 0
        self._note(key, Kind.READ, called_ns, found=document.value, cas=document.cas, by=who)
        return document.value, document.cas

    async def _swap(self, who: str, key: bytes) -> None:
        expected, cas = await self._get(who, key)
        if not cas:
            return
        value, called_ns = self._new_value(who), time.monotonic_ns()
        try:
            done = await self._kv.set(key, value, cas=cas)
        except (CasMismatchError, NotFoundError):
            self._note(
                key, Kind.SWAP, called_ns, value=value, expected=expected, found=False, by=who
            )
        except DcpdError as error:
            self._failed(key, Kind.SWAP, called_ns, error, value=value, expected=expected, by=who)
        else:
            self._note(
                key, Kind.SWAP, called_ns, value=value, expected=expected, found=True,
                cas=done.cas, by=who,
            )  # fmt: skip

    # -- counters ----------------------------------------------------------------------------------

    async def _count(self, who: str) -> None:
        while not self._is_over:
            key = self._draw.choice(COUNTER_KEYS)
            called_ns = time.monotonic_ns()
            try:
                frame = await self._increment(key)
            except LookupError:  # nothing was sent
                await asyncio.sleep(0.1)
                continue
            if frame is None or frame.status == Status.SYNC_WRITE_AMBIGUOUS:
                self._note_ambiguous(key, Kind.ADD, called_ns, by=who)
            elif frame.status == Status.OK:
                number = int.from_bytes(frame.value, "big")
                self._note(key, Kind.ADD, called_ns, found=number, cas=frame.cas, by=who)
            elif frame.status in _NOT_DONE:
                self.refusals[f"counter: {Status(frame.status).name}"] += 1
                await asyncio.sleep(0.05)
            else:
                raise LoadError(f"INCREMENT was answered with {frame}")
            await asyncio.sleep(REST_S)

    def _vb_of(self, key: bytes) -> int:
        topology = self._kv.topology
        return vbucket_of(key, NUM_VBUCKETS if topology is None else topology.num_vbuckets)

    async def _increment(self, key: bytes) -> Frame | None:
        """Return the answer, None if none came. Raises LookupError if nothing was sent."""
        topology, vb_id = self._kv.topology, self._vb_of(key)
        place = None if topology is None else topology.place_of(vb_id)
        if place is None:
            raise LookupError(key)
        link = await self._link_to(place)
        request = link.request(
            Opcode.INCREMENT, vb_id=vb_id, key=_with_prefix(link, key), extras=_COUNT
        )
        try:
            async with asyncio.timeout(COUNTER_TIMEOUT_S):
                return await request
        except (DcpdError, TimeoutError):
            link.close()
            return None

    async def _link_to(self, place: tuple[str, int]) -> Link:
        """Return a connection. Raises LookupError."""
        link = self._links.get(place)
        if link is None or link.is_closed:
            try:
                link = await Link.connect(self._kv.address.at(*place), timeout_s=COUNTER_TIMEOUT_S)
            except DcpdError as error:
                # An old map names a dead node: any operation of the KvClient brings a newer one.
                raise LookupError(str(error)) from None
            other = self._links.get(place)
            if other is not None and not other.is_closed:  # another counter was quicker
                link.close()
                return other
            self._links[place] = link
        return link

    # -- readers of one node -----------------------------------------------------------------------

    async def _read(self, name: str) -> None:
        """Ask one node for all keys, and go on asking while it does not answer."""
        link: Link | None = None
        while not self._is_over:
            await asyncio.sleep(READ_EVERY_S)
            if link is None or link.is_closed:
                address = self._addresses().get(name)
                if address is None:
                    continue
                try:
                    link = await Link.connect(parse_address(address), timeout_s=COUNTER_TIMEOUT_S)
                except DcpdError:
                    continue
            if len(self._reads) < READS_OPEN_MAX:
                key = self._draw.choice((*REGISTER_KEYS, *COUNTER_KEYS))
                task = asyncio.create_task(self._read_at(link, key, f"reader of {name}"))
                self._reads.add(task)
                task.add_done_callback(self._reads.discard)
        if link is not None:
            link.close()

    async def _read_at(self, link: Link, key: bytes, who: str) -> None:
        called_ns = time.monotonic_ns()
        try:
            frame = await link.request(
                Opcode.GET, vb_id=self._vb_of(key), key=_with_prefix(link, key)
            )
        except DcpdError:
            return
        if frame.status == Status.OK:
            found = _number_or_bytes(key, frame.value)
            self._note(key, Kind.READ, called_ns, found=found, cas=frame.cas, by=who)
        elif frame.status == Status.KEY_ENOENT:
            self._note(key, Kind.READ, called_ns, found=None, by=who)

    # -- many keys ---------------------------------------------------------------------------------

    async def _load(self) -> None:
        number = 0
        while not self._is_over:
            documents = {
                b"loaded-%06d" % (number + at): b"%d" % self._draw.getrandbits(60)
                for at in range(LOADED_AT_ONCE)
            }
            number += LOADED_AT_ONCE
            called_ns = time.monotonic_ns()
            results = await self._kv.set_many(documents)
            self.loading |= dict.fromkeys(documents, (called_ns, time.monotonic_ns()))
            for (key, value), result in zip(documents.items(), results, strict=True):
                if isinstance(result, MutationResult):
                    self.loaded[key] = value
                    self.counts["answered"] += 1
                else:
                    assert isinstance(result, DcpdError)
                    self._refused(result)
                    if result.may_have_applied:
                        self.maybe[key] = value
            await asyncio.sleep(LOAD_EVERY_S)

    # -- what happened -----------------------------------------------------------------------------

    def _note(self, key: bytes, kind: Kind, called_ns: int, **parts: object) -> None:
        self.counts["answered"] += 1
        operation = Operation(kind, called_ns, time.monotonic_ns(), **parts)  # type: ignore[arg-type]
        self.histories[key].append(operation)

    def _note_ambiguous(self, key: bytes, kind: Kind, called_ns: int, **parts: object) -> None:
        self.counts["ambiguous"] += 1
        self.histories[key].append(Operation(kind, called_ns, None, **parts))  # type: ignore[arg-type]

    def _failed(
        self, key: bytes, kind: Kind, called_ns: int, error: DcpdError, **parts: object
    ) -> None:
        self._refused(error)
        if error.may_have_applied:
            self._note_ambiguous(key, kind, called_ns, **parts)

    def _refused(self, error: DcpdError) -> None:
        self.refusals[type(error).__name__] += 1


def _number_or_bytes(key: bytes, value: bytes) -> Value:
    return int(value) if key in COUNTER_KEYS else value


def _with_prefix(link: Link, key: bytes) -> bytes:
    return b"\0" + key if link.has_collections else key
