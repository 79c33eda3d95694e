"""The operator who builds the records of a simulated cluster anew, as `dcpctl cluster meta restore`
does: after the metadata store went back to a copy, or if only members that are lost could say
whether a record is the newest.

He does so where the nodes say that the store is older than what they have seen. What may be lost is
given up, as with `--accept-loss`, only when the faults are over and every node that is left runs:
each such record is in `given_up`, and what it may have cost is an excuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from failover.coordinator.meta_restore import MetaRestore, NodeTestimony
from failover.coordinator.records import (
    ClusterKeys,
    KeyKind,
    ManifestRecord,
    decode_partition,
    decode_record,
)
from failover.coordinator.seen_records import older_records, reports_in, why_not_elected
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import KeyValue, Put, Range, RangeResult, Txn, TxnResult
from failover.metadata.revision_store import RevisionStore
from sim.clock import WALL_START_NS
from sim.store_client import ROOT
from sim.world import MS, SECOND, World

KEYS: Final = ClusterKeys(ROOT)
LOOK_NS: Final = 300 * MS
"""How often he looks at the nodes."""
WAITS_NS: Final = 600 * MS
"""How long something has to wait for members that do not speak, before he gives them up."""


class Nodes(NamedTuple):
    """What he asks of the nodes."""

    store: Callable[[], RevisionStore]
    views: Callable[[], list[ClusterView]]
    """Of those that run."""
    testimonies: Callable[[str], list[NodeTestimony]]
    """The same."""
    all_run: Callable[[], bool]
    """Whether every node runs whose folder is not lost."""
    are_unproven: Callable[[], bool]
    """Whether a master that runs does not know whether another one was elected since."""
    collections_uid: Callable[[], int]
    """Of the newest list of collections that is in force on one of those that run."""


class Restorer:
    """See the module."""

    def __init__(self, world: World, nodes: Nodes) -> None:
        self._world = world
        self._nodes = nodes
        self._asked = 0
        self._waited_ns = 0
        """Since when something waits for members that do not speak; 0: nothing does."""
        self.is_tidying = False
        """Whether nothing may be left that waits: the faults are over."""
        self.restored: set[tuple[int, int]] = set()
        """Partition and epoch of the records that were built anew."""
        self.given_up: set[tuple[int, int]] = set()
        """Those of them for which something may be lost."""

    def begin(self) -> None:
        """Look after the store from now on."""
        self._world.after(LOOK_NS, self._look)

    def _look(self) -> None:
        views = self._nodes.views()
        if any(older_records(view) for view in views) or self.lacks_collections():
            self._restore(accepts_loss=False)
        waits = any(map(_waits_for_silent, views)) or self._nodes.are_unproven()
        self._waited_ns = self._waited_ns or self._world.now_ns if waits else 0
        is_long = waits and self._world.now_ns - self._waited_ns >= WAITS_NS
        if self.is_tidying and self._nodes.all_run() and is_long:
            self._restore(accepts_loss=True)
        self._world.after(LOOK_NS, self._look)

    def lacks_collections(self) -> bool:
        """Whether the store has an older list of collections than a node that runs."""
        found = self._nodes.store().apply(self._world.now_ns, Range(KEYS.manifest))
        assert isinstance(found, RangeResult)
        uids = [decode_record(item, ManifestRecord).uid for item in found.items]
        return self._nodes.collections_uid() > max(uids, default=0)

    def _restore(self, *, accepts_loss: bool) -> None:
        """Build records anew, as far as that is possible."""
        self._asked += 1
        operation, now_ns, store = f"restore{self._asked}", self._world.now_ns, self._nodes.store()
        found = store.apply(now_ns, Range(KEYS.root, is_prefix=True))
        assert isinstance(found, RangeResult)
        plan = MetaRestore(
            KEYS, found.items, self._nodes.testimonies(operation), operation=operation,
            unix_s=(WALL_START_NS + now_ns) / SECOND, accepts_loss=accepts_loss,
        ).plan()  # fmt: skip
        for txn in plan.txns:
            self._note(txn, set(plan.lossy))
            result = store.apply(now_ns, txn)
            assert isinstance(result, TxnResult)
            assert result.succeeded, "nobody has written meanwhile"
        if plan.txns:
            lost = sorted(plan.lossy) if accepts_loss else []
            self._world.note(f"records built anew: {plan.rebuilt}, with losses: {lost}")

    def _note(self, txn: Txn, lossy: set[int]) -> None:
        for put in txn.then:
            name = KEYS.parse(put.key)
            if not isinstance(put, Put) or name is None or name.kind is not KeyKind.PARTITION:
                continue
            record = decode_partition(_item(put)).record
            self.restored.add((name.vb_id, record.epoch))
            if name.vb_id in lossy:
                self.given_up.add((name.vb_id, record.epoch))


def _item(put: Put) -> KeyValue:
    return KeyValue(put.key, put.value, 1, 1, 1)


def _waits_for_silent(view: ClusterView) -> bool:
    """Whether an election waits for members that do not speak, although all run that are left."""
    reports = reports_in(view)
    return bool(older_records(view)) or any(
        vb_id in reports and why_not_elected(view, stored.content.record, reports[vb_id])[0]
        for vb_id, stored in view.partitions.items()
    )
