"""States that differ only in the names of replicas count as one."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from failover.rules.replication_record import ReplicationRecord

from .values import NAMES, Replicas, State, Store, Table


class Renaming:
    """Finds the one state that stands for all that differ in names only.

    Replicas are sorted by what can be seen of them without names. If two look alike, all their
    orders are tried, and the smallest state stands for them.
    """

    def __init__(self, count: int, stores: Table[Store], replicas: Replicas) -> None:
        self._count, self._members = count, NAMES[:count]
        self._known_stores, self._known_replicas = stores, replicas
        self._orders = list(permutations(range(count)))
        self._place = {order: number for number, order in enumerate(self._orders)}
        self.looks: Table[Any] = Table()
        self._look: dict[int, int] = {}
        self._seats: dict[int, tuple[int, ...]] = {}
        self._replicas: dict[tuple[int, int], int] = {}
        self._stores: dict[tuple[int, int], int] = {}

    def canonical(self, state: State) -> State:
        count = self._count
        record = state[0]
        seats = self._seats.get(record) or self._find_seats(record)
        look = self._look
        keys = [
            (look[each] if each in look else self._find_look(each)) * 256 + seat
            for each, seat in zip(state[1 : count + 1], seats, strict=True)
        ]
        order = tuple(sorted(range(count), key=keys.__getitem__))
        if len(set(keys)) == count:
            return self._renamed(state, self._place[order])
        ranked = [keys[each] for each in order]
        return min(
            self._renamed(state, place)
            for place, each in enumerate(self._orders)
            if [keys[index] for index in each] == ranked
        )

    def _renamed(self, state: State, place: int) -> State:
        order = self._orders[place]
        changed = [self._store(state[0], place)]
        changed += [self._replica(state[index + 1], place) for index in order]
        return (*changed, *state[len(order) + 1 :])

    def _find_look(self, number: int) -> int:
        replica = self._known_replicas.values[number]
        lead = replica.lead
        seen = None
        if lead is not None:
            asked = -1 if lead.asked is None else len(lead.asked)
            acks = sorted((-1, -1) if each is None else each for each in lead.acknowledged)
            copies = sorted(-1 if each is None else each for each in lead.numbers)
            sent = -1 if lead.sender is None else lead.sender[1]
            parts = (lead.rank, lead.rank_in, lead.proven_in, len(lead.parting))
            seen = (tuple(acks), len(lead.confirmed), asked, lead.epoch_start, sent,
                    tuple(copies), parts)  # fmt: skip
        nameless = replica._replace(lead=None, sender=replica.sender and (0, *replica.sender[1:]))
        self._look[number] = self.looks.number((*nameless, seen))
        return self._look[number]

    def _find_seats(self, number: int) -> tuple[int, ...]:
        record = self._known_stores.values[number].record
        self._seats[number] = tuple(
            (-1 if (copy := record.number_of(member)) is None else copy) * 4
            + (member in record.isr) * 2
            + (member == record.master)
            + 4
            for member in self._members
        )
        return self._seats[number]

    def _names(self, place: int) -> dict[str, str]:
        return {NAMES[old]: NAMES[new] for new, old in enumerate(self._orders[place])}

    def _store(self, number: int, place: int) -> int:
        key = (number, place)
        if key not in self._stores:
            store, names = self._known_stores.values[number], self._names(place)
            earlier = tuple(self._record(each, names) for each in store.earlier)
            saved = None if store.saved is None else self._record(store.saved, names)
            record = self._record(store.record, names)
            new = store._replace(record=record, earlier=earlier, saved=saved)
            self._stores[key] = self._known_stores.number(new)
        return self._stores[key]

    def _record(self, record: ReplicationRecord, names: dict[str, str]) -> ReplicationRecord:
        return ReplicationRecord(
            copies=tuple(sorted(names[each] for each in record.copies)),
            isr=frozenset(names[each] for each in record.isr),
            epoch=record.epoch,
            master=None if record.master is None else names[record.master],
            handover=record.handover,
            branch=record.branch,
            filling=frozenset(names[each] for each in record.filling),
            added=frozenset((names[each], number) for each, number in record.added),
            adds=record.adds,
            partition_epoch=record.partition_epoch,
        )

    def _replica(self, number: int, place: int) -> int:
        replica = self._known_replicas.values[number]
        if replica.lead is None and replica.sender is None:
            return number
        key = (number, place)
        if key not in self._replicas:
            lead, names, order = replica.lead, self._names(place), self._orders[place]
            renamed = replica
            if replica.sender is not None:
                by, *rest = replica.sender
                renamed = replica._replace(sender=(order.index(by), *rest))
            if lead is None:
                return self._replicas.setdefault(key, self._known_replicas.number(renamed))
            asked, sender = lead.asked, lead.sender
            new = lead._replace(
                sender=None if sender is None else (order.index(sender[0]), sender[1]),
                acknowledged=tuple(lead.acknowledged[old] for old in self._orders[place]),
                numbers=tuple(lead.numbers[old] for old in self._orders[place]),
                confirmed=frozenset(names[each] for each in lead.confirmed),
                parting=frozenset(names[each] for each in lead.parting),
                asked=None if asked is None else frozenset(names[each] for each in asked),
            )
            self._replicas[key] = self._known_replicas.number(renamed._replace(lead=new))
        return self._replicas[key]
