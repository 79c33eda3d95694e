"""What clients do beside plain documents: expiries, lists, WITH_META, collections, replicas.

Each key has one use, which its first letter tells, so a checker knows what may happen to it:

    t  documents that expire          j  lists that grow by sub-document commands
    m  documents with a revision and a CAS from elsewhere
    x  documents of collections, which are dropped and created again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sim.clock import WALL_START_NS
from sim.facts import Facts, Kind, Operation
from sim.plan import Plan
from sim.workload import Workload
from sim.world import SECOND, World

Choices = Sequence[Kind]

_USES: Final[dict[bytes, Choices]] = {
    b"t": (
        *(Kind.GET,) * 5, *(Kind.SET,) * 3, *(Kind.TOUCH,) * 2, *(Kind.GET_AND_TOUCH,) * 2,
        *(Kind.ADD,) * 2, Kind.REPLACE, Kind.DELETE, Kind.GET_REPLICA,
    ),
    b"j": (*(Kind.PUSH,) * 6, *(Kind.GET,) * 4, Kind.DELETE, Kind.GET_REPLICA),
    b"m": (*(Kind.SET_WITH_META,) * 5, *(Kind.GET,) * 4, Kind.SET, Kind.DELETE, Kind.GET_REPLICA),
    b"x": (
        *(Kind.GET,) * 4, *(Kind.SET,) * 4, *(Kind.ADD,) * 2, Kind.APPEND, Kind.DELETE,
        Kind.GET_REPLICA,
    ),
}  # fmt: skip
_EXPIRING: Final = frozenset({Kind.SET, Kind.ADD, Kind.REPLACE, Kind.TOUCH, Kind.GET_AND_TOUCH})
_DURABLE: Final = frozenset({Kind.SET, Kind.ADD, Kind.REPLACE, Kind.DELETE, Kind.APPEND, Kind.PUSH})
"""Commands that have a durability frame."""
_LIMITED: Final = _EXPIRING | {Kind.APPEND, Kind.INCREMENT}
PAST_NS: Final = 20_000 * SECOND
"""A CAS of SET_WITH_META is so old that no clock that jumps finds it too far ahead."""
REVISIONS: Final = 60
"""SET_WITH_META asks for a revision below this one, so it wins and loses."""


class WideWorkload(Workload):
    """Draws the operations of one client. See the module."""

    def __init__(self, world: World, plan: Plan, client: str, facts: Facts) -> None:
        super().__init__(world, plan, client)
        self._facts = facts
        self._versions: dict[int, int] = {}
        """The version that the client saw last, by partition."""

    def draw(self) -> Operation:
        """Return the next operation."""
        world, plan = self._world, self._plan
        keys = plan.wide_keys
        collection = 0
        live = list(self._facts.collections.values())
        if live and plan.collection_keys and world.chance(0.4):
            keys = plan.collection_keys
            collection = live[world.below(len(live))]
        key = keys[world.below(len(keys))]
        kinds = _USES[key[:1]]
        kind = kinds[world.below(len(kinds))]
        if kind is Kind.GET_REPLICA and plan.nodes == 1:
            kind = Kind.OBSERVE if plan.vb_of(key) in self._versions else Kind.GET
        operation = self.operation(kind, key, collection)
        self._limit(operation)
        if kind is Kind.OBSERVE:
            operation.vb_uuid = self._versions[operation.vb_id]
            return operation
        if key[:1] == b"t" and kind in _EXPIRING:
            operation.expiry_s = 1 + world.below(3)
        if kind is Kind.SET_WITH_META:
            operation.rev_seqno = 1 + world.below(REVISIONS)
            operation.initial = WALL_START_NS - PAST_NS + world.below(SECOND)
        elif kind in {Kind.SET, Kind.DELETE} and world.chance(plan.cas_share):
            operation.cas_asked = self._cas.get(key, 0) if not collection else 0
        if kind in _DURABLE and world.chance(plan.durability_share):
            operation.level = 1 + world.below(3)
        return operation

    def _limit(self, operation: Operation) -> None:
        """Note the maxTTL of the collection in which an operation stores a document."""
        if operation.kind in _LIMITED:
            operation.max_ttl_s = self._facts.max_ttls.get(operation.collection, 0)

    def learned(self, operation: Operation) -> None:
        """Keep the CAS and the version of an answer."""
        super().learned(operation)
        if operation.seqno:
            self._versions[operation.vb_id] = operation.vb_uuid
