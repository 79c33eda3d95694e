"""Carries out the effects of a `ClusterSession` on a `MetaStore`, and returns the answers. Pure.

Who calls it: the node and the simulator, which give it a store, the time, and a function that takes
what is left: changes of the view, elections, outcomes and notices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from failover.coordinator.cluster_session import ClusterSession, SessionEffect
from failover.coordinator.effects import Answered, CancelWatch, Delivered, Submit, Tag, Tick, Watch
from failover.metadata.metastore import (
    MetaStore,
    StoreResult,
    WatchBatch,
    WatchHandle,
    WatchMessage,
)

LATE_NS: Final = 200_000_000
"""A tick that comes so long after the one before is late: at least one is missing."""


class StoreDriver:
    """See the module."""

    def __init__(
        self,
        session: ClusterSession,
        store: MetaStore,
        now_ns: Callable[[], int],
        take: Callable[[SessionEffect], None],
        guard: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """`guard` runs what the store's answers cause, and handles what is raised; None: nothing
        handles it.
        """
        self.session = session
        self._store = store
        self._now_ns = now_ns
        self._take = take
        self._guard = guard or _run
        self._watches: dict[Tag, WatchHandle] = {}
        self._is_closed = False
        self._ticked_ns = now_ns()
        self._has_waited = False
        """Whether the last tick was left out."""
        self._era = -1
        """The connection of the store's client that the session knows; -1: none."""

    def _look_at_era(self) -> None:
        """Tell the session if there is a new connection, before anything that came over it."""
        if self._era != self._store.era:
            self._era = self._store.era
            self.carry_out(self.session.begin_again(self._now_ns(), self._era))

    def tick(self) -> None:
        """Let time pass; call it at least every 100 ms.

        A call that comes late does nothing, once: answers may have come meanwhile that this process
        has not read yet, and each of them would else count as none.
        """
        if self._is_closed:
            return
        self._look_at_era()
        now_ns = self._now_ns()
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
                self._take(effect)

    def close(self) -> None:
        """End all watches and ignore all answers."""
        self._is_closed = True
        for handle in self._watches.values():
            handle.cancel()
        self._watches.clear()

    def _answered(self, tag: Tag, result: StoreResult) -> None:
        if not self._is_closed:
            self._guard(partial(self._happened, Answered(tag, result)))

    def _delivered(self, tag: Tag, message: WatchMessage) -> None:
        if not isinstance(message, WatchBatch):
            self._watches.pop(tag, None)  # it was the last message
        if not self._is_closed:
            self._guard(partial(self._happened, Delivered(tag, message)))

    def _happened(self, event: Answered | Delivered) -> None:
        self._look_at_era()
        self.carry_out(self.session.on_event(self._now_ns(), event))


def _run(step: Callable[[], None]) -> None:
    step()
