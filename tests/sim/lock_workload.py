"""Operations of clients that lock documents, ask how far partitions are persisted, and store
documents in collections that have a maxTTL.

Their keys begin with `l`. Each client keeps the CAS of the locks that it was given, also of those
that are over: what it does with one of them has to be refused then.
"""

from __future__ import annotations

from typing import Final

from sim.facts import LASTS_S, Facts, Kind, Operation
from sim.plan import Plan
from sim.wide_workload import WideWorkload
from sim.world import World

_OF_LOCKS: Final = (
    *(Kind.GET_AND_LOCK,) * 4, *(Kind.UNLOCK,) * 3, *(Kind.GET,) * 4, *(Kind.SET,) * 5,
    *(Kind.APPEND,) * 2, Kind.REPLACE, Kind.TOUCH, Kind.ADD, Kind.DELETE,
)  # fmt: skip
_WITH_CAS: Final = frozenset({Kind.SET, Kind.REPLACE, Kind.APPEND, Kind.DELETE, Kind.UNLOCK})
_DURABLE: Final = frozenset({Kind.SET, Kind.REPLACE, Kind.APPEND, Kind.DELETE})
_LIMITED: Final = (
    *(Kind.GET,) * 5, *(Kind.SET,) * 4, *(Kind.ADD,) * 2, Kind.REPLACE, Kind.APPEND, Kind.INCREMENT,
    Kind.TOUCH, Kind.GET_AND_TOUCH,
)  # fmt: skip
_ASKING: Final = frozenset({Kind.SET, Kind.ADD, Kind.REPLACE, Kind.TOUCH, Kind.GET_AND_TOUCH})
OBSERVE_SHARE: Final = 0.15
LIMITED_SHARE: Final = 0.35
NO_LOCK: Final = 1
"""A CAS that no lock has."""


class LockWorkload(WideWorkload):
    """Draws the operations of one client. See the module."""

    def __init__(self, world: World, plan: Plan, client: str, facts: Facts) -> None:
        super().__init__(world, plan, client, facts)
        self._locks: dict[bytes, tuple[int, bytes]] = {}
        """Key -> CAS of the last lock that it was given, and the value that was locked."""
        self._older: dict[int, list[int]] = {}
        """Partition -> the versions that it saw, oldest first."""

    def draw(self) -> Operation:
        """Return the next operation."""
        world, plan = self._world, self._plan
        seen = [key for key in plan.default_keys if plan.vb_of(key) in self._older]
        if seen and world.chance(OBSERVE_SHARE):
            return self._observe(seen[world.below(len(seen))])
        limited = [each for each in self._facts.collections.values() if each in self._limits]
        if limited and world.chance(LIMITED_SHARE):
            return self._of_collection(limited[world.below(len(limited))])
        key = plan.lock_keys[world.below(len(plan.lock_keys))]
        operation = self.operation(_OF_LOCKS[world.below(len(_OF_LOCKS))], key)
        kind, lock = operation.kind, self._locks.get(key)
        if kind is Kind.GET_AND_LOCK:
            operation.lock_s = 1 + world.below(2)
        elif kind in _WITH_CAS and lock is not None and world.chance(0.5):
            operation.cas_asked = operation.lock_cas = lock[0]
            operation.locked_value = lock[1]
        elif kind is Kind.UNLOCK:
            operation.cas_asked = self._cas.get(key, NO_LOCK)
        elif kind in _WITH_CAS and world.chance(plan.cas_share):
            operation.cas_asked = self._cas.get(key, 0)
        if kind in _DURABLE and world.chance(plan.durability_share):
            operation.level = 1 + world.below(3)
        return operation

    @property
    def _limits(self) -> dict[int, int]:
        return self._facts.max_ttls

    def _observe(self, key: bytes) -> Operation:
        """Ask about the newest version that it saw of a key's partition, or one before."""
        world = self._world
        operation = self.operation(Kind.OBSERVE, key)
        versions = self._older[operation.vb_id]
        is_older = len(versions) > 1 and world.chance(0.5)
        operation.vb_uuid = versions[world.below(len(versions) - 1)] if is_older else versions[-1]
        return operation

    def _of_collection(self, collection: int) -> Operation:
        """Store a document that lasts less than its collection allows, longer, or for ever; or look
        at it.
        """
        world, keys = self._world, self._plan.collection_keys
        kind = _LIMITED[world.below(len(_LIMITED))]
        operation = self.operation(kind, keys[world.below(len(keys))], collection)
        self._limit(operation)
        if kind in _ASKING:
            operation.expiry_s = (0, 0, 1, LASTS_S)[world.below(4)]
        return operation

    def learned(self, operation: Operation) -> None:
        """Keep the CAS, the version and the lock of an answer."""
        super().learned(operation)
        if operation.kind is Kind.GET_AND_LOCK and operation.lock_cas:
            self._locks[operation.key] = operation.lock_cas, operation.value or b""
        if operation.seqno:
            versions = self._older.setdefault(operation.vb_id, [])
            if operation.vb_uuid not in versions:
                versions.append(operation.vb_uuid)
