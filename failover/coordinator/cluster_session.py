"""One node's session with the metadata store, and what carries out its effects.
Pure.

**The session** has all cluster cores behind one `on_event`. It routes answers and watch messages to
the core that asked, and shows every change of the view to the coordinator. What it returns is for
the node: requests and watches to carry out (the driver), changes of the view, elections,
outcomes of the node's own writes, and notices.

Who calls it: the node and the simulator.

**The driver** carries out its effects on a `MetaStore`, and returns the answers.

Who calls it: the node and the simulator, which give it a store and a `NodeShell`. The shell takes
what is left: changes of the view, elections, outcomes and notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from failover.coordinator.coordinator import COORDINATOR, Coordinator, Elected
from failover.coordinator.effects import (
    Answered,
    CancelWatch,
    Delivered,
    Notice,
    StoreEffect,
    StoreEvent,
    Submit,
    Tag,
    Tick,
    ViewChanged,
    Watch,
)
from failover.coordinator.membership import (
    LEASE_TTL_S,
    MEMBERSHIP,
    REPORTER,
    Membership,
    SuspectReporter,
)
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.record_writer import RecordChange, RecordWriter, WriteOutcome
from failover.coordinator.records import ClusterKeys, ReportedPartition
from failover.coordinator.view import READER, ClusterView, ViewReader
from failover.metadata.metastore import (
    MetaStore,
    StoreResult,
    StoreWatch,
    WatchBatch,
    WatchMessage,
)

_ERA_BITS: Final = 20
"""A process that connects anew a million times over has told the others by then."""
RECORDS: Final = "records"
"""The core that writes for the partitions whose master is this node."""

SessionEffect: TypeAlias = StoreEffect | ViewChanged | Elected | WriteOutcome | Notice


class NodeShell(Protocol):
    """What carries out the effects of a node's cores: the node's process, or a simulated node. The
    driver and `ReplicationCore` call it in the middle of their work, so it must not call them back
    except where it says so.
    """

    def now_ns(self) -> int:
        """Return the monotonic time."""

    def take(self, effect: SessionEffect) -> None:
        """Take an effect that the driver does not carry out. It may call the cores."""

    def guarded(self, step: Callable[[], None]) -> None:
        """Run what an answer of the store causes, and handle what it raises."""

    def ask_store(self, effects: Iterable[SessionEffect]) -> None:
        """Carry out effects of the session (`StoreDriver.carry_out`)."""

    def depose(self, vb_ids: tuple[int, ...], why: str) -> None:
        """Answer what waits in connections for a commit in partitions that this node does not
        master any more, for the reason given: it may or may not be committed.
        """


class ClusterSession:
    """See the module. `incarnation` grows with every start of this member's process."""

    def __init__(
        self,
        root: bytes,
        member: str,
        incarnation: int,
        settings: CoordinatorSettings,
        *,
        lease_s: int = LEASE_TTL_S,
    ) -> None:
        keys = ClusterKeys(root)
        owner = f"{member}.{incarnation}"
        self.view = ClusterView(keys)
        self.link = 0
        """Names this process's present connection to the store among those of all its processes;
        0: there was none yet. The store has it under the member's alive key."""
        self.era = 0
        """The store's client counts its connections so."""
        self.membership = Membership(keys, member, incarnation, lease_s=lease_s)
        self.coordinator = Coordinator(self.view, self.membership, owner, settings)
        self.reader = self._reader = ViewReader(self.view)
        self._reporter = SuspectReporter(keys, self.membership)
        self._writer = RecordWriter(self.view, RECORDS, owner)
        self._cores: Final[dict[str, Callable[[int, Any], Iterable[SessionEffect]]]] = {
            MEMBERSHIP: self.membership.on_event,
            READER: self._reader.on_event,
            REPORTER: self._reporter.on_event,
            RECORDS: self._writer.on_event,
            COORDINATOR: self.coordinator.on_event,
            self.coordinator.writer_core: self.coordinator.on_event,
        }

    @property
    def has_read(self) -> bool:
        """Whether the view was read over the present connection to the store."""
        return not self._reader.starts_over

    @property
    def may_write(self) -> bool:
        """Whether the last `write` has its outcomes."""
        return self._writer.is_idle

    def on_event(self, now_ns: int, event: StoreEvent) -> list[SessionEffect]:
        """Take one event; return what to do and what happened."""
        if not isinstance(event, Tick):
            return self._shown(now_ns, self._cores[event.tag.core](now_ns, event))
        effects: list[SessionEffect] = []
        for on_event in dict.fromkeys(self._cores.values()):
            effects += self._shown(now_ns, on_event(now_ns, event))
        return effects

    def begin_again(self, now_ns: int, era: int) -> list[SessionEffect]:
        """There is a new connection to the store, which may be an older copy of it."""
        self.era = era
        self.link = self.membership.incarnation << _ERA_BITS | era & ((1 << _ERA_BITS) - 1)
        self.membership.begin_again(now_ns, self.link)
        self.coordinator.begin_again(now_ns)
        self._reporter.begin_again()
        return list(self._reader.begin_again(now_ns))

    def link_of(self, member: str) -> int | None:
        """Return the name of a member's connection to this store, as it wrote it; None: none."""
        alive = self.view.alive.get(member)
        return None if alive is None else alive.content.link

    def report(self, now_ns: int, partitions: tuple[ReportedPartition, ...]) -> list[SessionEffect]:
        """Report these partitions from now on: their master is not heard. () for none."""
        return list(self._reporter.report(now_ns, partitions))

    def begin_to_leave(self, now_ns: int) -> None:
        """Let the others know that this process is about to stop: it gets no partition any more."""
        self.membership.begin_to_leave(now_ns)

    def leave(self) -> list[SessionEffect]:
        """End this member's lease: its keys go, and it takes no further part."""
        return list(self.membership.leave())

    def write(self, now_ns: int, changes: Sequence[RecordChange]) -> list[SessionEffect]:
        """Write records as their master; the outcomes come as effects of later events."""
        return self._shown(now_ns, self._writer.write(now_ns, changes))

    def _shown(self, now_ns: int, effects: Iterable[SessionEffect]) -> list[SessionEffect]:
        """Show the membership and the coordinator what changed in the view."""
        shown: list[SessionEffect] = []
        for effect in effects:
            shown.append(effect)
            if isinstance(effect, ViewChanged):
                own = self.view.alive.get(self.membership.member)
                shown += self.membership.see(now_ns, own, self.view.revision)
                shown += self.coordinator.on_event(now_ns, effect)
        return shown


LATE_NS: Final = 200_000_000
"""A tick that comes so long after the one before is late: at least one is missing."""


class StoreDriver:
    """See the module."""

    def __init__(
        self,
        session: ClusterSession,
        store: MetaStore,
        shell: NodeShell,
    ) -> None:
        self.session = session
        self._store = store
        self._shell = shell
        self._watches: dict[Tag, StoreWatch] = {}
        self._is_closed = False
        self._ticked_ns = shell.now_ns()
        self._has_waited = False
        """Whether the last tick was left out."""
        self._era = -1
        """The connection of the store's client that the session knows; -1: none."""

    def _look_at_era(self) -> None:
        """Tell the session if there is a new connection, before anything that came over it."""
        if self._era != self._store.era:
            self._era = self._store.era
            self.carry_out(self.session.begin_again(self._shell.now_ns(), self._era))

    def tick(self) -> None:
        """Let time pass; call it at least every 100 ms.

        A call that comes late does nothing, once: answers may have come meanwhile that this process
        has not read yet, and each of them would else count as none.
        """
        if self._is_closed:
            return
        self._look_at_era()
        now_ns = self._shell.now_ns()
        ticked_ns, self._ticked_ns = self._ticked_ns, now_ns
        self._has_waited = not self._has_waited and now_ns - ticked_ns > LATE_NS
        if not self._has_waited:
            self.carry_out(self.session.on_event(now_ns, Tick()))

    def carry_out(self, effects: Iterable[SessionEffect]) -> None:
        """Carry out effects, also those that `report` and `write` return."""
        for effect in effects:
            if isinstance(effect, Submit):
                self._store.submit(effect.request, partial(self._answered, effect.tag))
            elif isinstance(effect, Watch):
                self._watches[effect.tag] = self._store.watch(
                    effect.prefix, effect.from_revision, partial(self._delivered, effect.tag)
                )
            elif isinstance(effect, CancelWatch):
                watch = self._watches.pop(effect.tag, None)
                if watch is not None:
                    watch.cancel()
            else:
                self._shell.take(effect)

    def close(self) -> None:
        """End all watches and ignore all answers."""
        self._is_closed = True
        for handle in self._watches.values():
            handle.cancel()
        self._watches.clear()

    def _answered(self, tag: Tag, result: StoreResult) -> None:
        if not self._is_closed:
            self._shell.guarded(partial(self._happened, Answered(tag, result)))

    def _delivered(self, tag: Tag, message: WatchMessage) -> None:
        if not isinstance(message, WatchBatch):
            self._watches.pop(tag, None)  # it was the last message
        if not self._is_closed:
            self._shell.guarded(partial(self._happened, Delivered(tag, message)))

    def _happened(self, event: Answered | Delivered) -> None:
        self._look_at_era()
        self.carry_out(self.session.on_event(self._shell.now_ns(), event))
