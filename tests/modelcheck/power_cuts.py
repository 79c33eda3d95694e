"""Power cuts of one replica, or of all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .moves import emptied
from .values import NAMES, Lead, Replica, State, Step

if TYPE_CHECKING:
    from .model import Model


class PowerCuts:
    """See the module."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._cuts: dict[tuple[int, int, int], list[tuple[Step, int]]] = {}

    def steps(
        self, record: int, now: list[int], rest: tuple[int, ...]
    ) -> Iterator[tuple[Step, State]]:
        model, outcomes = self._model, []
        for i, each in enumerate(now):
            found = self._cuts.get((record, each, i))
            if found is None:
                found = self._cuts[record, each, i] = self._after_cut(record, each, i)
            outcomes.append(found)
            for step, new in found:
                yield step, model.after(record, now, i, new, rest, step)
        losing = [found[-1][1] for found in outcomes]
        yield Step("power cut of all", 0), model.settled(record, losing, rest)

    def _after_cut(self, store_number: int, number: int, i: int) -> list[tuple[Step, int]]:
        """Return the replica after each outcome of a cut, the worst one last.

        It has started again and read the record. What it kept it has synced; it forgot its HW.
        """
        model = self._model
        store, replica = model.stores.values[store_number], model.replicas.values[number]
        record, lead = store.record, None
        was_master = replica.lead is not None and replica.epoch == record.epoch
        if was_master and model.rules.is_master(record, NAMES[i], record.epoch):
            nobody = (None,) * len(model.members)
            lead = Lead(
                nobody, record.isr, None, replica.synced, None, model.numbers(record), record.rank,
                store.restores, store.restores,
            )  # fmt: skip
        outcomes = []
        for kept in range(len(replica.log), replica.synced - 1, -1):
            new = Replica(
                log=replica.log[:kept],
                synced=kept,
                versions=replica.versions,
                epoch=max(record.epoch, replica.epoch) if model.bounds.restores else record.epoch,
                life=store.life if record.epoch > replica.epoch else replica.life,
                seen=max(replica.seen, model.seen(record)),
                seen_in=model.seen_in(replica, record, store),
                hw=0,
                is_reconciled=lead is not None,
                lead=lead,
                copy=record.number_of(NAMES[i]),
            )
            new = emptied(new) if new.copy is None else new
            step = Step(f"power cut of {{0}}, which keeps {kept} records", i)
            outcomes.append((step, model.replicas.number(new)))
        return outcomes
