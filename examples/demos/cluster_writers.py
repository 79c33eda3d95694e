"""The clients of the cluster demo: they write documents until each is answered, and measure gaps.

Backlog      documents that are not answered yet, by partition
KvWriters    KvClient: batches for one node, so that a dead one stops its own batches only
SdkWriters   the official SDK `couchbase`, in threads, with durability level majority
Probes       single writes to partitions that have lost their master: how long until an answer
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import Durability, ServerDurability
from couchbase.exceptions import CouchbaseException, ExceptionMap
from couchbase.options import ClusterOptions, ClusterTimeoutOptions, UpsertMultiOptions
from couchbase.transcoder import RawJSONTranscoder

from dcpd import DcpdError, KvClient, MutationResult, vbucket_of

PARTITIONS = int(os.environ.get("DCPD_PARTITIONS", "1024"))
"""As many as the nodes have: they are started with the same environment."""
BATCH = 192
BATCHES_PER_NODE = 2
SDK_BATCH = 48
SDK_THREADS = 4
SDK_TIMEOUT = timedelta(seconds=8)
PROBE_PREFIX = b"probe-"
"""Of the keys that are no documents of the backlog."""
SDK_AMBIGUOUS = {
    ExceptionMap.AmbiguousTimeoutException.value,
    ExceptionMap.RequestCanceledException.value,
    ExceptionMap.DurabilitySyncWriteAmbiguousException.value,
}
"""Codes of errors after which a write may have happened. The code counts, not the class: after a
retry the SDK raises TemporaryFailException with them, too."""
PAUSE_S = 0.02
"""Where there is nothing to write now."""
Document = tuple[bytes, bytes]


class Ledger:
    """What was answered. All clients share it."""

    def __init__(self) -> None:
        self.answered: dict[bytes, bytes] = {}
        """Key -> value that the cluster has to have."""
        self.by: Counter[str] = Counter()
        """Client -> answered writes."""
        self.ambiguous = 0
        """Writes that may have happened; they were written again."""
        self.unsure = 0
        """The same of probes, which wait half a second only."""


class Backlog:
    """See the module. Any thread may take from it."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._queues: list[deque[Document]] = [deque() for _ in range(PARTITIONS)]
        self._lock = threading.Lock()
        self._left = 0
        for document in documents:
            self._queues[vbucket_of(document[0], PARTITIONS)].append(document)
            self._left += 1
        self.total = self._unanswered = self._left
        self._allowed = 0

    @property
    def unanswered(self) -> int:
        """How many documents are not answered yet, also those that a writer has just taken."""
        return self._unanswered

    def allow(self, share: float) -> None:
        """Let this share of the documents be written now, so that some are left for later acts."""
        self._allowed = int(self.total * share)

    def take(self, vb_ids: Sequence[int], count: int) -> list[Document]:
        """Return up to so many documents of these partitions, a few of each."""
        with self._lock:
            count = min(count, self._allowed - (self.total - self._left))
            taken: list[Document] = []
            each = max(1, count // 32)
            for vb_id in sorted(vb_ids, key=lambda vb_id: -len(self._queues[vb_id]))[:64]:
                queue = self._queues[vb_id]
                while queue and len(taken) < count and each:
                    taken.append(queue.popleft())
                    each -= 1
                each = max(1, count // 32)
            self._left -= len(taken)
            return taken

    def settle(self, taken: int, again: Sequence[Document]) -> None:
        """Note that so many documents were written, and take those back that were not answered."""
        with self._lock:
            for document in again:
                self._queues[vbucket_of(document[0], PARTITIONS)].appendleft(document)
            self._left += len(again)
            self._unanswered -= taken - len(again)


class KvWriters:
    """See the module."""

    def __init__(self, kv: KvClient, backlog: Backlog, ledger: Ledger) -> None:
        self._kv, self._backlog, self._ledger = kv, backlog, ledger
        self._busy: Counter[tuple[str, int]] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Write until everything is answered, also what other writers have taken: they may give it
        back. Cancel it to stop earlier.
        """
        try:
            while self._backlog.unanswered:
                for place, vb_ids in self._places().items():
                    self._begin(place, vb_ids)
                for task in [task for task in self._tasks if task.done()]:
                    self._tasks.discard(task)
                    task.result()
                await asyncio.sleep(PAUSE_S)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _places(self) -> dict[tuple[str, int], list[int]]:
        """Return the nodes and their partitions, as the newest map says."""
        found: dict[tuple[str, int], list[int]] = {}
        topology = self._kv.topology
        for vb_id in range(PARTITIONS):
            place = None if topology is None else topology.place_of(vb_id)
            if place is not None:
                found.setdefault(place, []).append(vb_id)
        return found

    def _begin(self, place: tuple[str, int], vb_ids: list[int]) -> None:
        while self._busy[place] < BATCHES_PER_NODE:
            batch = self._backlog.take(vb_ids, BATCH)
            if not batch:
                return
            self._busy[place] += 1
            self._tasks.add(asyncio.create_task(self._write(place, batch)))

    async def _write(self, place: tuple[str, int], batch: list[Document]) -> None:
        """Write a batch, and the next ones to the same node."""
        try:
            results = await self._kv.set_many(batch)
        finally:
            self._busy[place] -= 1
        ledger, again = self._ledger, []
        for document, result in zip(batch, results, strict=True):
            if isinstance(result, MutationResult):
                ledger.answered[document[0]] = document[1]
                ledger.by["KvClient"] += 1
                continue
            assert isinstance(result, DcpdError)
            ledger.ambiguous += result.may_have_applied
            again.append(document)
        self._backlog.settle(len(batch), again)


class SdkWriters:
    """See the module. A context manager."""

    def __init__(self, address: str, backlog: Backlog, ledger: Ledger) -> None:
        timeouts = ClusterTimeoutOptions(kv_timeout=SDK_TIMEOUT, kv_durable_timeout=SDK_TIMEOUT)
        login = PasswordAuthenticator("guest", "guest")
        self._cluster = Cluster(
            f"couchbase://{address}", ClusterOptions(login, timeout_options=timeouts)
        )
        self._cluster.wait_until_ready(SDK_TIMEOUT)
        self._documents = self._cluster.bucket("default").default_collection()
        self._backlog, self._ledger = backlog, ledger
        self._is_over = False
        self._failure: BaseException | None = None
        self._threads = [threading.Thread(target=self._run) for _ in range(SDK_THREADS)]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise what ended a thread."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """End the threads after what they do now."""
        self._is_over = True
        for thread in self._threads:
            thread.join()
        self._cluster.close()

    def _run(self) -> None:
        try:
            while not self._is_over:
                batch = self._backlog.take(range(PARTITIONS), SDK_BATCH)
                if batch:
                    self._write(batch)
                else:
                    time.sleep(PAUSE_S)
        except BaseException as error:  # noqa: BLE001 - `check` raises it in the main thread
            self._failure = error

    def _write(self, batch: list[Document]) -> None:
        durable = ServerDurability(Durability.MAJORITY)
        options = UpsertMultiOptions(transcoder=RawJSONTranscoder(), durability=durable)
        by_key: dict[str, Any] = {key.decode(): value for key, value in batch}
        done = self._documents.upsert_multi(by_key, options)
        failed = done.exceptions
        ledger, again = self._ledger, []
        for key, value in batch:
            error = failed.get(key.decode())
            if error is None:
                ledger.answered[key] = value
                ledger.by["SDK"] += 1
                continue
            if not isinstance(error, CouchbaseException):
                raise error
            ledger.ambiguous += error.error_code in SDK_AMBIGUOUS
            again.append((key, value))
        self._backlog.settle(len(batch), again)


class Probes:
    """See the module."""

    def __init__(self, kv: KvClient, ledger: Ledger) -> None:
        self.gaps_s: list[float] = []
        """One for each partition that has lost its master."""
        self._kv, self._ledger = kv, ledger
        self._keys = _keys_of_partitions()

    async def measure(self, vb_ids: Iterable[int], since_s: float) -> None:
        """Write to each of these partitions until it answers; note the time since the death."""
        await asyncio.gather(*(self._one(vb_id, since_s) for vb_id in vb_ids))

    async def _one(self, vb_id: int, since_s: float) -> None:
        key, value = self._keys[vb_id], b"%d" % time.monotonic_ns()
        while True:
            try:
                await self._kv.set(key, value)
            except DcpdError as error:
                self._ledger.unsure += error.may_have_applied
                continue
            break
        self.gaps_s.append(time.monotonic() - since_s)
        self._ledger.answered[key] = value
        self._ledger.by["probes"] += 1


def _keys_of_partitions() -> dict[int, bytes]:
    """Return a key of each partition."""
    keys: dict[int, bytes] = {}
    number = 0
    while len(keys) < PARTITIONS:
        key = PROBE_PREFIX + b"%d" % number
        keys.setdefault(vbucket_of(key, PARTITIONS), key)
        number += 1
    return keys
