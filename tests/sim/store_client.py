"""A node's client of the metadata store: its faults, and answers that a stopped process waits for.

The store answers as events of nobody. A process takes an answer only while it runs, so each answer
becomes an event of the process: one that is stopped takes it when it goes on, and the next process
on the machine takes none of them.
"""

from __future__ import annotations

from collections.abc import Callable

from failover.coordinator.cluster_keys import ClusterKeys, KeyKind
from failover.metadata.metastore import (
    Put,
    StoreRequest,
    StoreResult,
    Txn,
    WatchHandle,
    WatchMessage,
)
from failover.metadata.revision_store import RevisionStore
from sim.world import MS, Host, World
from support.metastore_faults import Absence, FaultyMetaStore, StoreFaults

ROOT = b"/sim/"
_KEYS = ClusterKeys(ROOT)
DEADLINES_NS = (100 * MS, 500 * MS)
"""When a request without an answer ends as unknown: clients differ in their patience."""


class StoreClient:
    """See the module. It implements MetaStore."""

    def __init__(self, world: World, host: Host, store: RevisionStore) -> None:
        self._host = host
        self._world = world
        self._deadline_ns = DEADLINES_NS[world.below(len(DEADLINES_NS))]
        self.faults = StoreFaults()
        self.mend()
        self._inner = FaultyMetaStore(
            store, lambda: world.now_ns, world.after, world.draw, self.faults
        )

    @property
    def era(self) -> int:
        """See MetaStore."""
        return self._inner.era

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        """See MetaStore."""
        incarnation = self._host.incarnation
        if self._forgets_write and _writes_record(request):
            self._forgets_write = False
            self.be_deaf()

        def answered(result: StoreResult) -> None:
            world = self._world
            world.at(world.now_ns, self._host, incarnation, done, (result,))

        self._inner.submit(request, answered)

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> WatchHandle:
        """See MetaStore."""
        incarnation = self._host.incarnation

        def delivered(message: WatchMessage) -> None:
            world = self._world
            world.at(world.now_ns, self._host, incarnation, deliver, (message,))

        return self._inner.watch(prefix, from_revision, delivered)

    # -- faults ------------------------------------------------------------------------------------

    def mend(self) -> None:
        """Everything works again."""
        faults, self._forgets_write = self.faults, False
        faults.absence, faults.unknown_rate = Absence.HERE, 0.0
        faults.request_ns, faults.deadline_ns = (MS, MS), self._deadline_ns
        faults.answer_ns, faults.watch_ns = (MS // 2, 3 * MS), (MS // 2, 5 * MS)

    def be_away(self, way: Absence) -> None:
        """The store cannot be reached from here."""
        self.faults.absence = way

    def be_deaf(self) -> None:
        """Requests are carried out, and their answers are lost."""
        self.faults.absence = Absence.DEAF_TO_ANSWERS

    def be_slow(self) -> None:
        """Requests take long, and so do watches."""
        self.faults.request_ns = self.faults.watch_ns = (MS, 400 * MS)

    def be_late(self) -> None:
        """Requests arrive soon. Answers and watches are late, some of them after the deadline."""
        self.faults.answer_ns = self.faults.watch_ns = (200 * MS, 400 * MS)

    def forget_answers(self) -> None:
        """Half of the requests end without an answer; half of these are carried out."""
        self.faults.unknown_rate = 0.5

    def forget_next_write(self) -> None:
        """The next change of a partition's record is carried out; its answer is lost, and nothing
        is heard of the store from then on.
        """
        self._forgets_write = True

    def compact(self) -> None:
        """The store's history is compacted: watches that are late end."""
        self._inner.compact()


def _writes_record(request: StoreRequest) -> bool:
    """Whether a request changes the record of a partition."""
    if not isinstance(request, Txn):
        return False
    keys = [_KEYS.parse(put.key) for put in request.then if isinstance(put, Put)]
    return any(key is not None and key.kind is KeyKind.PARTITION for key in keys)
