"""The model: a few replicas of one partition, their logs, the store's record, and what can happen.

A state is a tuple of small integers: (store, replica, replica, ..., committed, writes, cuts). Each
number but the last two stands for a value in a table of the model, where equal values have equal
numbers. So a state is hashed fast, and what one step does to a replica, or to a pair of them, is
worked out once and then looked up. A replica that does nothing stands for one that is slow, cut off
or down. Names of replicas mean nothing, so states that differ only in names count as one.

Left out: reads, consumers, unclean elections and purges.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from failover.rules import promotion
from failover.rules import replication_record as records
from failover.rules.election import SuspectReport
from failover.rules.history import FailoverLog
from failover.rules.isr import Acknowledgement, Candidate, Sender
from failover.rules.replication_record import (
    UNSEEN,
    BranchUnderWay,
    HandedOver,
    Rank,
    ReplicationRecord,
    majority,
)

from .disks import check_disks, check_undone, disagreement
from .going_back import GoingBack
from .moves import Moves, emptied
from .power_cuts import PowerCuts
from .renaming import Renaming
from .rules import RIGHT, Entry, Rules
from .values import (
    NAMES,
    Bounds,
    Lead,
    Replica,
    Replicas,
    State,
    Step,
    Store,
    Stores,
    Table,
    ViolationError,
)

BRANCH_UUID = 1000
"""Versions of masters are named by their epoch, and by its history."""
LIFE_UUIDS = 100


class Model:
    """The states that follow a state, under given rules and bounds."""

    def __init__(self, bounds: Bounds, rules: Rules = RIGHT) -> None:
        self.bounds, self.rules = bounds, rules
        self.members = NAMES[: bounds.replicas]
        self.min_in_sync = bounds.min_in_sync or majority(bounds.replicas)
        self.stores = Stores()
        self.replicas = Replicas()
        self.committed: Table[tuple[Entry, ...]] = Table()
        self._alone: dict[tuple[int, int], list] = {}
        self._writes: dict[tuple[int, int], int] = {}
        self._pairs: dict[tuple[int, int, int, int], list] = {}
        self._with_record: dict[tuple[int, int, int], list] = {}
        self._elections: dict[tuple, list] = {}
        self._grown: dict[tuple[int, ...], int] = {}
        self._agree: dict[tuple[int, int], str] = {}
        self._heard: dict[tuple[int, ...], int] = {}
        self._told: dict[tuple[int, int, int, int], int] = {}
        self._moves = Moves(self)
        self._back = GoingBack(self)
        self._power = PowerCuts(self)
        self._renaming = Renaming(bounds.replicas, self.stores, self.replicas)

    @property
    def tables(self) -> tuple[Table, ...]:
        """What the numbers of states mean."""
        return (self.stores, self.replicas, self.committed, self._renaming.looks)

    def first(self) -> State:
        """The state in which the first replica has become master of an empty partition."""
        record = records.create(self.members)
        versions = FailoverLog.create(1, 1)
        nobody = (None,) * len(self.members)
        lead = Lead(nobody, record.isr, None, 0, None, self.numbers(record), record.rank)
        empty = Replica(
            (), 0, versions, 1, 0, is_reconciled=True, lead=None, seen=self.seen(record)
        )
        both = (empty._replace(lead=lead), empty._replace(sender=(0, 1, 0)))
        master, other = map(self.replicas.number, both)
        others = (other,) * (len(self.members) - 1)
        nothing = self.committed.number(())
        store = Store(record, has_ranks=self.bounds.restores > 0)
        return self.canonical((self.stores.number(store), master, *others, nothing, 0, 0))

    def seen(self, record: ReplicationRecord) -> Rank:
        """What counts of a record that is seen."""
        return record.rank if self.bounds.restores else UNSEEN

    def seen_in(self, replica: Replica, record: ReplicationRecord, store: Store) -> int:
        """How often the store had gone back when the newest record was seen that is on disk now."""
        return store.restores if self.seen(record) >= replica.seen else replica.seen_in

    def numbers(self, record: ReplicationRecord) -> tuple[int | None, ...]:
        """The numbers of all copies, by replica."""
        return tuple(map(record.number_of, self.members))

    def canonical(self, state: State) -> State:
        """The state under the names that stand for all states that differ in names only."""
        return self._renaming.canonical(state)

    def successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield each step that can be next and its state, not canonical; raise ViolationError."""
        count = self.bounds.replicas
        record, *now = state[: count + 1]
        committed, writes, cuts = state[count + 1 :]
        is_write_left = writes < self.bounds.writes
        masters = self.replicas.masters
        for i, each in enumerate(now):
            alone = self._alone.get((each, i))
            for step, new, told in self._find_alone(each, i) if alone is None else alone:
                rest = (committed, writes, cuts)
                if told is not None:
                    check_disks(self, record, each, now, told, step)
                    rest = (self._grow(record, each, committed, told, step), writes, cuts)
                yield step, self.after(record, now, i, new, rest, step)
            if is_write_left and each in masters:
                step = Step("{0} writes a record", i)
                new = self._written(each, writes + 1)
                rest = (committed, writes + 1, cuts)
                yield step, self.after(record, now, i, new, rest, step)
            key = (record, each, i)
            known = self._with_record.get(key)
            for step, new_record, new, promoted in (
                self._find_with(*key) if known is None else known
            ):
                if promoted is None or self._can_be_promoted(
                    record, committed, new, promoted, step
                ):
                    rest = (self._undo(record, new_record, committed), writes, cuts)
                    yield step, self.after(new_record, now, i, new, rest, step)
            if each in masters:
                yield from self._pair_steps(record, now, i, (committed, writes, cuts))
        if cuts < self.bounds.cuts:
            yield from self._power.steps(record, now, (committed, writes, cuts + 1))
        for step, new_record in self._election_steps(record, now):
            yield step, self.settled(new_record, list(now), (committed, writes, cuts))
        for step, new_record, changed in self._back.steps(record, now):
            yield step, self.settled(new_record, list(changed), (committed, writes, cuts))
        if self.bounds.moves:
            for step, new_record in self._moves.steps(record):
                yield step, self.settled(new_record, list(now), (committed, writes, cuts))

    def after(
        self, record: int, now: list[int], i: int, new: int, rest: tuple[int, ...], step: Step
    ) -> State:
        """The state with one replica changed, after its history was compared with the others'."""
        changed = list(now)
        changed[i] = new
        if new != now[i]:
            self._check_agreement(changed, i, step)
        return self.settled(record, changed, rest)

    def settled(self, record: int, now: list[int], rest: tuple[int, ...]) -> State:
        """The state after what happens at once: masters hear what replicas acknowledge, and
        replicas what their master has synced.

        An acknowledgement that arrives late permits less: the HW rises later, and by one seqno at a
        time. So nothing that could go wrong is left out. The same holds for a master's word.
        """
        masters = self.replicas.masters
        for i, each in enumerate(now):
            if each in masters:
                for j, other in enumerate(now):
                    if j != i:
                        key = (now[i], other, j)
                        new = self._heard.get(key)
                        now[i] = self._hear(*key) if new is None else new
                        pair = (now[i], other, i, j)
                        told = self._told.get(pair)
                        now[j] = self._tell(*pair) if told is None else told
                key = (record, now[i])
                new = self._heard.get(key)
                now[i] = self._depose(*key) if new is None else new
        if record in self.stores.late:
            known = min(self.replicas.values[each].epoch for each in now)
            record = self.stores.number(self.stores.values[record].without(known))
        return (record, *now, *rest)

    def _hear(self, master_number: int, number: int, j: int) -> int:
        """Return the master after the replica's acknowledgement."""
        master, replica = self.replicas.values[master_number], self.replicas.values[number]
        new = master_number
        if (
            replica.lead is None
            and replica.is_reconciled
            and master.life == replica.life
            and self.rules.is_same_epoch(master.epoch, replica.epoch)
            and self._moves.is_fed(master, replica, j)
        ):
            assert master.lead is not None
            acks = list(master.lead.acknowledged)
            end = self.rules.acknowledgeable_seqno(replica.synced, len(replica.log))
            acks[j] = Acknowledgement(replica.epoch, end)
            lead = master.lead._replace(acknowledged=tuple(acks))
            new = self.replicas.number(master._replace(lead=lead))
        self._heard[master_number, number, j] = new
        return new

    def _tell(self, master_number: int, number: int, i: int, j: int) -> int:
        """Return the replica after it has heard what its master has synced of its log."""
        master, replica = self.replicas.values[master_number], self.replicas.values[number]
        new = number
        if (
            replica.lead is None
            and replica.is_reconciled
            and replica.sender is not None
            and replica.sender[:2] == (i, master.epoch)
            and master.life == replica.life
            and self.rules.is_same_epoch(master.epoch, replica.epoch)
            and self._moves.is_fed(master, replica, j)
        ):
            told = max(replica.sender[2], min(len(replica.log), master.synced))
            new = self.replicas.number(replica._replace(sender=(i, master.epoch, told)))
        self._told[master_number, number, i, j] = new
        return new

    def _depose(self, store_number: int, number: int) -> int:
        """Return a master, which if it is deposed hears nothing more of what it has asked for."""
        record, master = self.stores.values[store_number].record, self.replicas.values[number]
        lead, new = master.lead, number
        assert lead is not None
        if master.epoch < record.epoch and lead.asked is not None:
            members = self._effective(lead)
            new = self.replicas.number(
                master._replace(lead=lead._replace(confirmed=members, asked=None))
            )
        self._heard[store_number, number] = new
        return new

    # What a replica does alone.

    def _find_alone(self, number: int, i: int) -> list:
        """Return (step, new replica, committed prefix or None)."""
        replica, found = self.replicas.values[number], []
        lead = replica.lead
        if replica.synced < len(replica.log):
            synced = replica._replace(synced=len(replica.log))
            found.append((Step("{0} syncs its log", i), self.replicas.number(synced), None))
        if lead is not None:
            found += self._raise_hw(replica, lead, i)
            if lead.asked is None:
                found += self._ask(replica, lead, i)
        self._alone[number, i] = found
        return found

    def _written(self, number: int, value: int) -> int:
        new = self._writes.get((number, value))
        if new is None:
            replica = self.replicas.values[number]
            entry = Entry(replica.versions.current.vb_uuid, replica.epoch, value)
            new = self.replicas.number(replica._replace(log=(*replica.log, entry)))
            self._writes[number, value] = new
        return new

    def _raise_hw(self, replica: Replica, lead: Lead, i: int) -> Iterator[tuple]:
        """The HW rises by one seqno at a time, because acknowledgements may arrive late."""
        given = {
            member: ack
            for member, ack in zip(self.members, lead.acknowledged, strict=True)
            if ack is not None
        }
        own = self.rules.acknowledgeable_seqno(replica.synced, len(replica.log))
        given[NAMES[i]] = Acknowledgement(replica.epoch, own)
        members = self._effective(lead)
        sender = None if lead.sender is None else Sender(NAMES[lead.sender[0]], lead.sender[1])
        hw = self.rules.high_watermark(
            replica.hw, replica.epoch, members, given, self.min_in_sync, sender
        )
        if hw > replica.hw:
            new = replica._replace(hw=replica.hw + 1)
            told = self.committed.number(replica.log[: replica.hw + 1])
            yield Step(f"{{0}} commits up to seqno {new.hw}", i), self.replicas.number(new), told

    def _effective(self, lead: Lead) -> frozenset[str]:
        return self.rules.effective_isr(lead.confirmed, lead.asked) | lead.parting

    def _ask(self, replica: Replica, lead: Lead, i: int) -> Iterator[tuple]:
        for j, member in enumerate(self.members):
            if j == i:
                continue
            if member in lead.confirmed:
                asked, word = lead.confirmed - {member}, "without"
            elif lead.numbers[j] is not None and self._may_join(replica, lead.acknowledged[j]):
                asked, word = lead.confirmed | {member}, "with"
            else:
                continue
            new = replica._replace(lead=lead._replace(asked=asked))
            step = Step(f"{{0}} asks the store for an in-sync set {word} {{1}}", i, j)
            yield step, self.replicas.number(new), None

    def _may_join(self, replica: Replica, ack: Acknowledgement | None) -> bool:
        assert replica.lead is not None
        start = self.rules.start_to_reach(replica.versions.current.seqno, replica.lead.epoch_start)
        return ack is not None and self.rules.may_join(
            Candidate(ack, is_caught_up=True), replica.epoch, replica.hw, start
        )

    # What a replica does with the record.

    def _find_with(self, store_number: int, number: int, i: int) -> list:
        """Return (step, new record, new replica, promoted by the newest record or None)."""
        store, replica = self.stores.values[store_number], self.replicas.values[number]
        found: list[tuple] = []
        for record in (*store.earlier, store.record):
            if record.rank < replica.seen:
                continue
            if replica.epoch < record.epoch:
                found += self._learn(record, store_number, replica, i)
            elif self.bounds.moves and replica.epoch == record.epoch:
                found += self._moves.seen(record, store_number, replica, i)
        lead = replica.lead
        if (
            lead is not None
            and (replica.epoch, replica.life) == (store.record.epoch, store.life)
            and lead.numbers == self.numbers(store.record)
            and store.record.rank >= max(lead.rank, replica.seen)
            and lead.proven_in == store.restores
        ):
            if lead.asked is not None:
                found += self._change_isr(store, store_number, replica, lead, i)
            elif store.record.branch is not None:
                found += self._finish_branch(store, replica, lead, number, i)
            elif (
                store.record.epoch < self.bounds.epochs
                and store.record.isr == lead.confirmed
                and self._back.may_write(store)
            ):
                found += self._hand_over(store, replica, i)
                if self.bounds.branches and store.undone is None:
                    found += self._start_branch(store, replica, i)
        self._with_record[store_number, number, i] = found
        return found

    def _learn(
        self, record: ReplicationRecord, store_number: int, replica: Replica, i: int
    ) -> Iterator[tuple]:
        copy = record.number_of(NAMES[i])
        new = replica._replace(
            epoch=record.epoch, is_reconciled=False, lead=None, hw=0, copy=copy,
            seen=max(replica.seen, self.seen(record)),
            seen_in=self.seen_in(replica, record, self.stores.values[store_number]),
            life=self.stores.values[store_number].life,
        )  # fmt: skip
        if copy is None:
            new = emptied(new)
        if not self.rules.is_master(record, NAMES[i], replica.epoch):
            step = Step(f"{{0}} learns of epoch {record.epoch}", i)
            if new.sender is not None and not self.rules.has_sent(new.sender[1], new.epoch + 1):
                new = new._replace(sender=None)
            yield step, store_number, self.replicas.number(new), None
            return
        end = len(replica.log)
        back, start, committed = self.rules.first_step(record, replica.versions, end)
        versions = replica.versions
        if back is not None:
            assert record.branch is not None
            versions = versions.branch(record.branch.vb_uuid, back, record.epoch)
            end = back
        if start is not None:
            name = record.epoch + LIFE_UUIDS * new.life
            versions = versions.branch(name, start, record.epoch)
        # A master that is elected again may still have what was acknowledged to it before.
        acks = replica.lead.acknowledged if replica.lead else (None,) * len(self.members)
        sender = None
        if new.sender is not None and self.rules.has_sent(new.sender[1], new.epoch):
            sender = (new.sender[0], self.rules.sender_seqno(new.sender[2], end))
        lead = Lead(
            acks, record.isr, None, end, sender, self.numbers(record), record.rank,
            self.stores.values[store_number].restores, self.stores.values[store_number].restores,
        )  # fmt: skip
        new = new._replace(
            log=replica.log[:end], synced=end, versions=versions, is_reconciled=True, lead=lead,
            sender=None,
        )  # fmt: skip
        kept = "in the version handed over" if start is None else f"with a version from {start}"
        is_newest = record == self.stores.values[store_number].record
        for hw in sorted({committed, end}):
            words = f"{{0}} learns of epoch {record.epoch} and is master, {kept}, HW {hw}"
            number = self.replicas.number(new._replace(hw=hw))
            yield Step(words, i), store_number, number, is_newest

    def _change_isr(
        self, store: Store, number: int, replica: Replica, lead: Lead, i: int
    ) -> Iterator[tuple]:
        assert lead.asked is not None
        record = store.record
        if (
            record.isr == lead.confirmed
            and record.rank == lead.rank
            and self._back.may_write(store)
        ):
            leaving, joining = lead.confirmed - lead.asked, lead.asked - lead.confirmed
            new = store.changed(records.expand(records.shrink(record, leaving), joining))
            step = Step("the store has the in-sync set that {0} asked for", i)
            yield step, self.stores.number(new), self.replicas.number(replica), None
        if record.isr == lead.asked:
            parting = frozenset[str]()
            if self.bounds.restores:
                parting = (lead.parting | lead.confirmed) - lead.asked
            heard = replica._replace(
                lead=lead._replace(
                    confirmed=lead.asked,
                    asked=None,
                    rank=record.rank,
                    rank_in=store.restores,
                    parting=parting,
                )
            )
            step = Step("{0} hears that its in-sync set is confirmed", i)
            yield step, number, self.replicas.number(heard), None

    def _start_branch(self, store: Store, replica: Replica, i: int) -> Iterator[tuple]:
        """One transaction. The master then begins the new epoch like one that is elected."""
        epoch = store.record.epoch + 1
        resigned = self.replicas.number(replica._replace(lead=None, is_reconciled=False, hw=0))
        for seqno in range(len(replica.log)):
            record = records.start_branch(store.record, BranchUnderWay(BRANCH_UUID, seqno))
            new = store.changed(record)._replace(undone=(epoch, seqno))
            step = Step(f"{{0}} starts a branch at seqno {seqno}", i)
            yield step, self.stores.number(new), resigned, None

    def _finish_branch(
        self, store: Store, replica: Replica, lead: Lead, number: int, i: int
    ) -> Iterator[tuple]:
        given = zip(self.members, lead.acknowledged, strict=True)
        epochs = {member: ack.epoch for member, ack in given if ack is not None}
        if promotion.is_branch_done(store.record, {**epochs, NAMES[i]: replica.epoch}):
            new = store.changed(records.finish_branch(store.record))
            yield Step("{0} finishes the branch", i), self.stores.number(new), number, None

    def _hand_over(self, store: Store, replica: Replica, i: int) -> Iterator[tuple]:
        """All is committed, and writers are held back: this is one transaction."""
        end, record = len(replica.log), store.record
        if replica.hw != end:
            return
        handed = HandedOver(replica.versions.current.vb_uuid, end)
        for j, member in enumerate(self.members):
            if j != i and member in record.isr:
                new = store.changed(records.hand_over(records.want(record, member), handed))
                resigned = replica._replace(lead=None, is_reconciled=False, hw=0)
                step = Step("{0} hands over to {1}", i, j)
                yield step, self.stores.number(new), self.replicas.number(resigned), None

    def _election_steps(self, number: int, now: list[int]) -> list:
        """Any members of the ISR may have reported, and the store may see the lease as over."""
        store = self.stores.values[number]
        record = store.record
        if record.epoch >= self.bounds.epochs or not self._back.may_write(store):
            return []
        key = (number, *now)
        reports = []
        for i, each in enumerate(now):
            replica = self.replicas.values[each]
            is_here = (replica.epoch, replica.life) == (record.epoch, store.life)
            if is_here and replica.lead is None:
                end = replica.synced
                at_end = replica.versions.epoch_at(end)
                report = SuspectReport(NAMES[i], record.epoch, at_end, end, 0)
                reports.append(self._back.report(store, replica, report))
            elif (speech := self._back.speech(replica, i)) is not None:
                reports.append(speech)
        key = (number, *reports)
        if key not in self._elections:
            elected = {
                self.rules.master_to_elect(
                    record,
                    told,
                    0,
                    is_lease_over=self._back.is_lease_over(record, told),
                    min_in_sync=self.min_in_sync,
                )
                for count in range(1, len(reports) + 1)
                for told in combinations(reports, count)
            }
            self._elections[key] = [
                each
                for member in sorted(filter(None, elected))
                for each in self._elect(store, member)
            ]
        return self._elections[key]

    def _elect(self, store: Store, member: str) -> Iterator[tuple[Step, int]]:
        """The old master stays in the ISR, or leaves it because its node is known to be gone."""
        record = store.record
        i, old = NAMES.index(member), record.master
        assert old is not None
        new = store.changed(records.elect(record, member))
        yield Step("the store elects {0}", i), self.stores.number(new)
        if old != member:
            step = Step("the store elects {0}, and {1} is gone", i, NAMES.index(old))
            new = store.changed(records.elect(record, member, gone={old}))
            yield step, self.stores.number(new)

    # What a master and a replica do with each other.

    def _pair_steps(
        self, record: int, now: list[int], i: int, rest: tuple[int, ...]
    ) -> Iterator[tuple[Step, State]]:
        for j, other in enumerate(now):
            if j == i:
                continue
            key = (now[i], other, i, j)
            found = self._pairs.get(key)
            if found is None:
                found = self._pairs[key] = list(self._find_pair(*key))
            for step, new_i, new_j in found:
                changed = list(now)
                changed[i], changed[j] = new_i, new_j
                if new_j != other:
                    self._check_agreement(changed, j, step)
                yield step, self.settled(record, changed, rest)

    def _find_pair(self, master_number: int, number: int, i: int, j: int) -> Iterator[tuple]:
        master, replica = self.replicas.values[master_number], self.replicas.values[number]
        if replica.lead is not None:
            return
        if master.life != replica.life:
            return
        if not self.rules.is_same_epoch(master.epoch, replica.epoch):
            return
        if not self._moves.is_fed(master, replica, j):
            return
        if not replica.is_reconciled:
            yield self._reconcile(master, master_number, replica, i, j)
            return
        if len(replica.log) < self.rules.sendable_seqno(master.synced, len(master.log)):
            entry = master.log[len(replica.log)]
            new = replica._replace(log=(*replica.log, entry))
            step = Step(f"{{1}} receives seqno {len(new.log)} from {{0}}", i, j)
            yield step, master_number, self.replicas.number(new)

    def _reconcile(
        self, master: Replica, master_number: int, replica: Replica, i: int, j: int
    ) -> tuple:
        back = self.rules.truncation(replica.history, master.history)
        if back is None:
            sender = (i, master.epoch, min(len(replica.log), master.synced))
            new = replica._replace(versions=master.versions, is_reconciled=True, sender=sender)
            return Step("{1} reconciles with {0}", i, j), master_number, self.replicas.number(new)
        kept = tuple(each for each in replica.versions.entries if each.seqno <= back)
        new = replica._replace(
            log=replica.log[:back],
            synced=min(replica.synced, back),
            versions=FailoverLog(kept),
            hw=min(replica.hw, back),
        )
        step = Step(f"{{1}} cuts its log back to {back} to follow {{0}}", i, j)
        return step, master_number, self.replicas.number(new)

    # What must hold.

    def _undo(self, old: int, new: int, committed: int) -> int:
        """Return what is committed after a branch has begun: what it leaves."""
        branched = self.stores.values[new].undone
        if branched is None or self.stores.values[old].undone is not None:
            return committed
        return self.committed.number(self.committed.values[committed][: branched[1]])

    def _grow(self, store_number: int, number: int, committed: int, told: int, step: Step) -> int:
        """Return the longer of two committed histories; they must agree."""
        key = (store_number, number, committed, told)
        if key not in self._grown:
            store, epoch = self.stores.values[store_number], self.replicas.values[number].epoch
            old, new = self.committed.values[committed], self.committed.values[told]
            shorter = min(len(old), len(new))
            grown = committed if len(old) >= len(new) else told
            if store.undone is not None and epoch < store.undone[0]:
                grown = committed  # answered late by a master from before the branch, and undone
            elif old[:shorter] != new[:shorter]:
                raise ViolationError("two different records are committed with one seqno", step)
            else:
                check_undone(store, new, step)
            self._grown[key] = grown
        return self._grown[key]

    def _can_be_promoted(
        self, store_number: int, committed: int, new: int, is_newest: bool, step: Step
    ) -> bool:
        """Return whether a new master may know this HW; by the newest record it has all."""
        kept, replica = self.committed.values[committed], self.replicas.values[new]
        if is_newest:
            if replica.log[: len(kept)] != kept:
                raise ViolationError("a committed record is lost: the new master lacks it", step)
            check_undone(self.stores.values[store_number], replica.log, step)
        return kept[: replica.hw] == replica.log[: replica.hw]

    def _check_agreement(self, now: list[int], i: int, step: Step) -> None:
        mine = now[i]
        for j, other in enumerate(now):
            if j != i and other != mine:
                problem = self._agree.get((mine, other))
                if problem is None:
                    values = self.replicas.values
                    problem = disagreement(values[mine], values[other])
                    self._agree[mine, other] = self._agree[other, mine] = problem
                if problem:
                    raise ViolationError(problem, step)
