"""What a coordinator does with copies: drops them and adds them again, and who sees that when.

A drop and an addition leave the epoch as it is. The master, and the member, see each of them late
and in their own time; a member may see that its copy was dropped although it was added again since.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from failover.rules import replication_record as records
from failover.rules.replication_record import ReplicationRecord

from .values import NAMES, Replica, Step, Store

if TYPE_CHECKING:
    from .model import Model


def emptied(replica: Replica) -> Replica:
    """A replica that has given up its copy."""
    return replica._replace(
        log=(), synced=0, versions=replica.versions.cut(0), hw=0, is_reconciled=False
    )


class Moves:
    """See the module."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._steps: dict[int, list[tuple[Step, int]]] = {}

    def steps(self, store_number: int) -> list[tuple[Step, int]]:
        """What the coordinator can write now: step, new store."""
        found = self._steps.get(store_number)
        if found is None:
            found = self._steps[store_number] = list(self._find(store_number))
        return found

    def _find(self, store_number: int) -> Iterator[tuple[Step, int]]:
        model = self._model
        store = model.stores.values[store_number]
        record = store.record
        if store.moves == model.bounds.moves or record.branch is not None:
            return
        for j, member in enumerate(model.members):
            if member not in record.copies:
                yield self._written(store, records.add_copy(record, member), "adds", j)
            elif member != record.master:
                isr = record.isr - {member}
                if isr == record.isr or len(isr) >= model.min_in_sync:
                    after = records.drop_copies(record, [member], in_sync_min=model.min_in_sync)
                    yield self._written(store, after, "drops", j)

    def _written(self, store: Store, record: ReplicationRecord, word: str, j: int) -> tuple:
        new = store.changed(record)._replace(moves=store.moves + 1)
        return Step(f"the coordinator {word} the copy of {{0}}", j), self._model.stores.number(new)

    def is_fed(self, master: Replica, replica: Replica, j: int) -> bool:
        """Whether a master feeds a replica, and takes its acknowledgements."""
        assert master.lead is not None
        number = master.lead.numbers[j]
        has_copies = number is not None and replica.copy is not None
        return has_copies and self._model.rules.is_same_copy(number, replica.copy)

    def seen(
        self, record: ReplicationRecord, store_number: int, replica: Replica, i: int
    ) -> Iterator[tuple]:
        """What a replica or a master sees of moves in its epoch: as `Model._find_with`."""
        model = self._model
        if replica.lead is not None:
            yield from self._seen_by_master(record, store_number, replica, i)
            return
        number = record.number_of(NAMES[i])
        if number == replica.copy:
            return
        if replica.copy is not None:
            new = emptied(replica)._replace(copy=None)
            words = "{0} sees that its copy was dropped, and empties it"
            yield Step(words, i), store_number, model.replicas.number(new), None
        if number is not None:
            new = replica._replace(copy=number, is_reconciled=False)
            step = Step(f"{{0}} sees that it has copy {number}", i)
            yield step, store_number, model.replicas.number(new), None

    def _seen_by_master(
        self, record: ReplicationRecord, store_number: int, replica: Replica, i: int
    ) -> Iterator[tuple]:
        model, lead = self._model, replica.lead
        assert lead is not None
        numbers = model.numbers(record)
        if numbers == lead.numbers:
            return
        acks = tuple(
            ack if model.rules.is_same_copy(before, after) else None
            for ack, before, after in zip(lead.acknowledged, lead.numbers, numbers, strict=True)
        )
        new = lead._replace(acknowledged=acks, confirmed=record.isr, asked=None, numbers=numbers)
        step = Step("{0} sees which copies there are", i)
        yield step, store_number, model.replicas.number(replica._replace(lead=new)), None
