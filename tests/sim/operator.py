"""An operator of a simulated cluster: asks for moves through the product's own requests.

It asks some node, whose view may be old, and writes what comes of it to the store. What is refused
is not written. Members whose folders are lost are removed as soon as that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from failover.coordinator.plans.plan_steps import eligible_members, progress_of
from failover.coordinator.plans.request_answers import Answer, Prepared, Stamp, refused_unreadable
from failover.coordinator.plans.requests import (
    cancel,
    drain,
    failover,
    move,
    rebalance,
    remove,
    set_cluster,
    undrain,
)
from failover.coordinator.records import PlanKind
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import TxnResult
from failover.metadata.revision_store import RevisionStore
from sim.world import MS, World

LOOK_NS: Final = 300 * MS
"""How often the operator looks for members to be removed."""


class Operator:
    """See the module. `views` returns the views of the nodes that run, `dead` the members whose
    folders are lost.
    """

    def __init__(
        self,
        world: World,
        store: Callable[[], RevisionStore],
        copies: int,
        views: Callable[[], list[ClusterView]],
        dead: Callable[[], set[str]],
    ) -> None:
        self._world = world
        self._store = store
        self._copies = copies
        self._views = views
        self._dead = dead
        self._asked = 0
        self.is_tidying = False
        """Whether nothing may be left that waits: the faults are over."""

    def begin(self) -> None:
        """Look after lost members from now on."""
        self._world.after(LOOK_NS, self._look)

    def ask(self, kind: str, about: str | None = None) -> bool:
        """Ask for something of a kind, for a member or any; return whether it was written."""
        views = self._views()
        if not views:
            return False
        view = views[self._world.below(len(views))]
        if refused_unreadable(view) is not None:
            return False
        return self._write(self._request(kind, view, self._stamp(), about))

    def _stamp(self) -> Stamp:
        self._asked += 1
        return Stamp(f"operator{self._asked}", 0)

    def _request(self, kind: str, view: ClusterView, stamp: Stamp, about: str | None) -> Answer:
        members = sorted(view.members)
        node = members[self._world.below(len(members))] if about is None else about
        vb_id = self._world.below(max(1, len(view.partitions)))
        drained = [name for name in members if view.members[name].content.is_drained]
        if kind == "rebalance":
            return rebalance(view, stamp)
        if kind == "move":
            return move(view, vb_id, node, stamp)
        if kind == "drain":  # one at a time, and only if enough nodes are left that can have copies
            if drained:
                return undrain(view, drained[0], stamp)
            if len(eligible_members(view)) <= self._copies:
                return Prepared(f"nothing, since without {node} too few could have copies")
            return drain(view, node, stamp)
        if kind == "cancel":
            return cancel(view, stamp)
        if kind == "fail_over":
            return failover(view, stamp, node=node)
        assert kind == "set_copies"
        assert view.cluster is not None
        more = self._copies + (view.cluster.content.copies == self._copies)
        return set_cluster(view, stamp, copies=more)

    def _write(self, answer: Answer) -> bool:
        if not isinstance(answer, Prepared) or not answer.txns:
            return False
        for txn in answer.txns:
            result = self._store().apply(self._world.now_ns, txn)
            if not isinstance(result, TxnResult) or not result.succeeded:
                return False
        self._world.note(f"operator: {answer.what}, {len(answer.moves)} moves")
        return True

    def _look(self) -> None:
        self._tidy()
        self._world.after(LOOK_NS, self._look)

    def _tidy(self) -> None:
        """Remove a member whose folder is lost. A plan that waits for one is cancelled; when the
        faults are over, any other one is, too, since it may take long.
        """
        for view in self._views():
            dead = sorted(self._dead() & view.members.keys())
            if refused_unreadable(view) is not None or not dead:
                continue
            told = progress_of(view)
            if told is None or told.kind is PlanKind.GROW:
                self._write(remove(view, dead[0], self._stamp()))
            elif told.waits_for.keys() & self._dead() or (
                self.is_tidying and told.kind is not PlanKind.REMOVE  # its own: it goes on
            ):
                self._write(cancel(view, self._stamp()))
            return
