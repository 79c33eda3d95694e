"""A node's client of the metadata store: its faults, and answers that a stopped process waits for.

The store answers as events of nobody. A process takes an answer only while it runs, so each answer
becomes an event of the process: one that is stopped takes it when it goes on, and the next process
on the machine takes none of them. The same holds for a connection that broke because the store went
back to a copy: nothing arrives over it any more, and the process notices that later.
"""

from __future__ import annotations

from collections.abc import Callable

from failover.coordinator.records import ClusterKeys, KeyKind
from failover.metadata.metastore import (
    OutcomeUnknown,
    Put,
    StoreRequest,
    StoreResult,
    StoreWatch,
    Txn,
    WatchMessage,
)
from failover.metadata.revision_store import RevisionStore
from sim.world import MS, Host, World
from support.metastore_faults import Absence, FaultyMetaStore, StoreFaults

ROOT = b"/sim/"
_KEYS = ClusterKeys(ROOT)
NOTICED_NS = 50 * MS
"""How late a process has its next connection to the store, at most."""
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
        self.era = 0
        """See MetaStore."""
        self._store = store
        self.connect()

    def connect(self) -> None:
        """Have a connection to the store as it is now."""
        world = self._world
        self.era += 1
        self._inner = FaultyMetaStore(
            self._store, lambda: world.now_ns, world.after, world.draw, self.faults
        )

    def replace_store(self, store: RevisionStore) -> None:
        """The store is another one from now on: it was restarted, or went back to a copy."""
        world, host = self._world, self._host
        self._inner.is_cut, self._store = True, store
        when_ns = world.now_ns + world.below(NOTICED_NS)
        world.at(when_ns, host, host.incarnation, self._connect_again, (self._inner,))

    def process_began(self) -> None:
        """Another process is on the machine."""
        if self._inner.is_cut:
            self.connect()

    def _connect_again(self, broken: FaultyMetaStore) -> None:
        if broken is self._inner:
            self.connect()

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        """See MetaStore."""
        incarnation, inner = self._host.incarnation, self._inner
        if self._forgets_write and _writes_record(request):
            self._forgets_write = False
            self.be_deaf()

        def answered(result: StoreResult) -> None:
            world = self._world
            world.at(world.now_ns, self._host, incarnation, taken, (result,))

        def taken(result: StoreResult) -> None:
            is_over = inner is not self._inner
            done(OutcomeUnknown("the connection to the store broke") if is_over else result)

        inner.submit(request, answered)

    def watch(
        self, prefix: bytes, from_revision: int, deliver: Callable[[WatchMessage], None]
    ) -> StoreWatch:
        """See MetaStore."""
        incarnation, inner = self._host.incarnation, self._inner

        def delivered(message: WatchMessage) -> None:
            world = self._world
            world.at(world.now_ns, self._host, incarnation, taken, (message,))

        def taken(message: WatchMessage) -> None:
            if inner is self._inner:
                deliver(message)

        return inner.watch(prefix, from_revision, delivered)

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
