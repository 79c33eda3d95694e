"""What `dcpctl consumer keep` and a consumer that saves its positions on the server store: each
partition keeps deletions for a consumer, which comes after them, slowly.

The limits are so wide that no run reaches them.
"""

from __future__ import annotations

import json

import cbor2

from sim.facts import Facts, Kind, Operation
from sim.plan import KEPT_CONSUMER, Plan
from sim.wide_workload import WideWorkload
from sim.world import World
from vbucket.model.consumer_documents import (
    BYTES_MAX,
    FOR_MAX_S,
    Keep,
    checkpoint_key,
    encode_keeps,
    keep_key,
)


class KeepWorkload(WideWorkload):
    """Draws the operations of one client. See the module."""

    def __init__(self, world: World, plan: Plan, client: str, facts: Facts) -> None:
        super().__init__(world, plan, client, facts)
        self._promised: dict[int, int] = {}
        """By partition that keeps something: the newest seqno that it told."""
        self._positions: dict[int, int] = {}

    def draw(self) -> Operation:
        """Return the next operation: first every partition has to keep something."""
        world, vb_ids = self._world, range(self._plan.partitions)
        missing = [vb_id for vb_id in vb_ids if vb_id not in self._promised]
        if missing:
            vb_id = missing[world.below(len(missing))]
            return self._stored(keep_key(vb_id), 0)
        vb_id = world.below(len(vb_ids))
        before, newest = self._positions.get(vb_id, 0), self._promised[vb_id]
        position = before + world.below(max(0, newest - before) + 1)
        self._positions[vb_id] = position
        return self._stored(checkpoint_key(KEPT_CONSUMER, vb_id), position)

    def _stored(self, key: bytes, seqno: int) -> Operation:
        """Return the operation that stores a keep, or a position. Its name is in there, so that
        every value is another one.
        """
        operation = self.operation(Kind.SET, key)
        operation.kept_seqno, operation.lasts_s = seqno, 0
        vb_id = operation.vb_id
        if key == keep_key(vb_id):
            keeps = json.loads(encode_keeps({KEPT_CONSUMER: Keep(FOR_MAX_S, BYTES_MAX, seqno)}))
            operation.argument = json.dumps(keeps | {"by": operation.name}).encode()
        else:
            positions = cbor2.dumps({vb_id: (0, seqno, seqno, seqno)})
            operation.argument = cbor2.dumps({"positions": positions, "by": operation.name})
        return operation

    def learned(self, operation: Operation) -> None:
        """Keep how far a partition has come."""
        super().learned(operation)
        if operation.seqno:
            self._promised[operation.vb_id] = operation.seqno
