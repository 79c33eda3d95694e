"""The metadata store that goes back to an older copy, and what replicas have seen of its records.

A copy is saved once, and the store goes back to it once, at any time. Then nobody knows what was
written since but those who have seen it. Only with `Bounds.restores` do ranks and what was seen
count in states: otherwise the store never goes back, and everybody is sure of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from failover.rules.election import SuspectReport
from failover.rules.replication_record import ReplicationRecord

from .values import NAMES, Replica, Step, Store

if TYPE_CHECKING:
    from .model import Model


class GoingBack:
    """See the module."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._is_on = model.bounds.restores > 0

    def may_write(self, store: Store) -> bool:
        """Whether the record may change once more, within the bounds."""
        return not self._is_on or store.record.partition_epoch < self._model.bounds.changes

    def steps(self, store_number: int, now: list[int]) -> Iterator[tuple[Step, int, list[int]]]:
        """Yield what happens to the store and to what is known of it: step, store, replicas."""
        if not self._is_on:
            return
        model = self._model
        store = model.stores.values[store_number]
        if store.saved is None:
            saved = model.stores.number(store._replace(saved=store.record))
            yield Step("a copy of the store is saved", 0), saved, now
        elif store.restores < model.bounds.restores and store.saved != store.record:
            new = store._replace(
                record=store.saved, earlier=(), restores=store.restores + 1, life=0
            )  # fmt: skip
            # Connections to it broke: nobody is sure of it any more.
            unsure = [
                model.replicas.number(model.replicas.values[each]._replace(is_sure=False))
                for each in now
            ]
            yield Step("the store goes back to the copy", 0), model.stores.number(new), unsure
        for i, each in enumerate(now):
            for words, replica in self._seen_by(store, each, now, i):
                changed = list(now)
                changed[i] = model.replicas.number(replica)
                yield Step(words, i), store_number, changed

    def _seen_by(
        self, store: Store, number: int, now: list[int], i: int
    ) -> Iterator[tuple[str, Replica]]:
        model = self._model
        replica, rank = model.replicas.values[number], store.record.rank
        if (replica.seen, replica.seen_in) < (rank, store.restores) and replica.seen <= rank:
            seen = replica._replace(seen=rank, seen_in=store.restores)
            yield "{0} has the record of the store on its disk", seen
        lead = replica.lead
        if lead is not None and lead.parting:
            # Of two stores the revisions are not compared (`Mastership.store_begins_again`).
            told = {NAMES[j]: model.replicas.values[each] for j, each in enumerate(now)}
            seen = {
                member: int(each.seen >= lead.rank and each.seen_in == lead.rank_in)
                for member, each in told.items()
            }
            if model.rules.is_held(lead.confirmed, 1, seen):
                freed = lead._replace(parting=frozenset())
                yield "{0} hears that its in-sync set has its record", replica._replace(lead=freed)
        if lead is not None and lead.proven_in < store.restores:
            values = model.replicas.values
            confirming = {
                NAMES[j]
                for j, each in enumerate(now)
                if (values[each].epoch, values[each].life) == (replica.epoch, replica.life)
                and (j == i or (values[each].is_reconciled and values[each].lead is None))
            }
            members = lead.confirmed | lead.parting | (lead.asked or frozenset())
            copies = [NAMES[j] for j, copy in enumerate(lead.numbers) if copy is not None]
            if model.rules.may_change_record(members, copies, confirming, model.min_in_sync):
                proven = replica._replace(lead=lead._replace(proven_in=store.restores))
                yield "{0} hears that nobody else was elected", proven
        if not replica.is_sure and self._is_served(store, now):
            yield (
                "{0} hears that the master serves by the store's record",
                replica._replace(is_sure=True),
            )

    def _is_served(self, store: Store, now: list[int]) -> bool:
        """Whether the master serves by the record that the store has: all of its in-sync set
        confirm it.
        """
        record, values = store.record, self._model.replicas.values
        if record.master is None:
            return False
        master = values[now[NAMES.index(record.master)]]
        lead = master.lead
        if master.life != store.life:
            return False
        if lead is None or lead.asked is not None or lead.parting or lead.rank != record.rank:
            return False
        members = (values[now[NAMES.index(member)]] for member in lead.confirmed)
        return all(
            (each.epoch, each.life) == (master.epoch, master.life) and each.is_reconciled
            for each in members
        )

    def report(self, store: Store, replica: Replica, report: SuspectReport) -> SuspectReport:
        """Return a report with what its member has seen."""
        if not self._is_on:
            return report._replace(seen=store.record.rank, is_sure=True)
        return report._replace(seen=replica.seen, is_sure=replica.is_sure)

    def is_lease_over(self, record: ReplicationRecord, told: Iterable[SuspectReport]) -> bool:
        """Whether the store may see the master's lease as over: not while the master speaks."""
        return not self._is_on or all(each.member != record.master for each in told)

    def speech(self, replica: Replica, i: int) -> SuspectReport | None:
        """Return what a member says that misses no master of this epoch; None: nothing."""
        if not self._is_on:
            return None
        return SuspectReport(NAMES[i], 0, 0, 0, 0, False, replica.seen)
