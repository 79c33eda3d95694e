"""The coordinator: the one member that elects masters. Pure.

    STANDBY --- the leader's key is absent ----------------> campaigns
    STANDBY --- elections are due and nobody holds them ---> deletes the leader's key, campaigns
    campaign succeeded -----------------------------------> LEADING
    LEADING --- its key or its lease is gone -------------> STANDBY

Every member runs one; the leader's key is under its member's lease. That a coordinator believes to
lead gives it no right: each of its writes compares the create revision of its key (its *term*) and
the mod revision of each record. So a successor may try early, before the lease of a dead
coordinator is over: as soon as its own view of the reports says that an election is due, and
nothing happens for a while. As long as elections that are due become fewer, something happens.

It does as much at a time as it can. A write that took long, because the store or one of the
processors is slow, is followed by a pause of the same length, and by a smaller one.

What it writes
- a clean election, when `failover.rules.election` says that the master is gone: the member of the
  ISR with the longest log, under the next epoch
- an unclean election, if nobody of the ISR is left, by the setting or an operator's command
- the wanted master, where the preferred copy has been in sync for a while and is not the master. It
  asks; the master hands over
- the next steps of the plan that is under way (`plan_steps`), and its end. Where copies are missing
  it makes a plan by itself (`plan`)

Masters write changes of their in-sync sets themselves. A record that cannot be read is left alone.

Who calls it: the node's session with the store, with every event and every change of the view.

Invariants
- without a lease there is no term
- only one write is under way, and its outcome is final before the next (`record_writer`)
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final, NamedTuple, TypeAlias

from failover.coordinator.clock import RanTime
from failover.coordinator.effects import (
    ANSWER_NS_MAX,
    RETRY_NS,
    Answered,
    Notice,
    StoreEffect,
    StoreEvent,
    Submit,
    Tag,
    Tick,
    ViewChanged,
)
from failover.coordinator.membership import Membership
from failover.coordinator.partition_choices import CoordinatorSettings, PartitionChoices
from failover.coordinator.plans.plan import PlanKeeper
from failover.coordinator.record_writer import (
    COMPARES_MAX,
    Guard,
    OutcomeKind,
    RecordChange,
    RecordWriter,
    WriteOutcome,
    WriterEffect,
    compares_of,
)
from failover.coordinator.records import LeaderRecord, encode_record
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import (
    Delete,
    KeyValue,
    Put,
    Range,
    StoreResult,
    Txn,
    TxnResult,
    if_absent,
    if_created_at,
)
from failover.rules.replication_record import ReplicationRecord

LEADER_GONE_NS: Final = 300_000_000
"""How long an election may be due whose old master is the coordinator's own node. A coordinator
that lives moves its own partitions within one transaction, a few milliseconds."""
LEADER_LATE_NS: Final = 1_000_000_000
"""The same for any other election: a coordinator that stands still, or cannot reach the store."""
LOOK_NS: Final = 200_000_000
"""Time between looks at all partitions while nothing is reported and the view stays as it is: only
wishes become due by time alone, and none of them is urgent."""
BATCH_NS: Final = 1_000_000_000
"""A write that took longer had too many records."""
BATCH_SLOW_MIN: Final = 32
"""Compares left after writes that took long."""
LATE_LOOK_NS: Final = 50_000_000
"""Time between looks whether elections are due that another coordinator does not write."""
DEPOSED_NS: Final = 60_000_000_000
"""For so long a coordinator that was deposed makes others wait twice as long for the next one."""
DEPOSED_MAX: Final = 3
"""How often it doubles."""
BATCH_MIN: Final = 2
"""Compares left after transactions that failed: one record, and the lease that it relies on."""
COORDINATOR: Final = "coordinator"


class _Late(NamedTuple):
    """Elections are due, and another coordinator does not write them."""

    leader_revision: int
    """The create revision of its key."""
    since_ns: int
    """Since when they do not become fewer."""
    due: int


class Elected(NamedTuple):
    """An election was written."""

    vb_id: int
    record: ReplicationRecord

    @property
    def is_clean(self) -> bool:
        """Whether the new master was in sync."""
        return self.record.unclean_epoch != self.record.epoch


class _Asked(Enum):
    """The request that this core waits for, or had last."""

    NOTHING = auto()
    CAMPAIGN = auto()
    DEPOSE = auto()
    PLAN = auto()


CoordinatorEffect: TypeAlias = StoreEffect | ViewChanged | Elected | Notice


class Coordinator:
    """See the module. `owner` is unique to this process."""

    def __init__(
        self,
        view: ClusterView,
        membership: Membership,
        owner: str,
        settings: CoordinatorSettings,
    ) -> None:
        self.term = 0
        """The create revision of this coordinator's key; 0: it does not lead."""
        self._view = view
        self._membership = membership
        self._choices = PartitionChoices(view, settings)
        self._plans = PlanKeeper(view, owner)
        self._plan_text = ""
        """What to log when the plan's beginning or end is written."""
        self._writer = RecordWriter(view, self.writer_core, owner)
        self._batch_max = COMPARES_MAX
        self._failed: set[int] = set()
        """Partitions whose last write failed."""
        self._tag = Tag(COORDINATOR, 0)
        self._asked = _Asked.NOTHING
        self._is_waiting = False
        self._until_ns = 0
        """When a missing answer counts as none, or the end of a pause."""
        self._late: _Late | None = None
        self._late_look_ns = 0
        self._deposed_ns: deque[int] = deque(maxlen=DEPOSED_MAX)
        """When this node deposed coordinators."""
        self._ran: RanTime | None = None
        """From the first tick on."""
        self._wrote_ns = 0
        """When the write that is under way began."""
        self._look_ns = 0
        """Until when nothing is to be written unless the view changes."""

    writer_core: Final = f"{COORDINATOR}-writes"
    """The name in the tags of its writes."""

    def begin_again(self, now_ns: int) -> None:
        """The store may be another one, where this coordinator's key is of another term."""
        self.term = self._look_ns = 0
        self._choices.begin_again(now_ns, self._membership.lease_ns)

    def on_event(self, now_ns: int, event: StoreEvent | ViewChanged) -> list[CoordinatorEffect]:
        """Take one event; return what to do."""
        effects: list[CoordinatorEffect] = []
        if isinstance(event, Tick):
            self._ran = self._ran or RanTime(now_ns)
            self._ran.tick(now_ns)
        if isinstance(event, ViewChanged):
            self._look_ns = 0
            self._choices.take_view(now_ns, event.vb_ids)
        else:
            effects += self._take_outcomes(now_ns, self._writer.on_event(now_ns, event))
        if isinstance(event, Answered) and event.tag == self._tag and self._is_waiting:
            self._is_waiting = False
            effects += self._answered(now_ns, event.result)
        elif isinstance(event, Tick) and self._is_waiting and now_ns >= self._until_ns:
            self._is_waiting = False
            self._plans.failed()
        return [*effects, *self._step(now_ns)]

    # ---- Leading or not

    def _step(self, now_ns: int) -> list[CoordinatorEffect]:
        effects = self._settle_term()
        if self._is_waiting or now_ns < self._until_ns or not self._may_lead():
            return effects
        if self.term:
            return [*effects, *self._lead(now_ns)]
        item = self._view.leader_item
        if item is None:
            return [*effects, self._campaign(now_ns)]
        if self._look_at_leader(now_ns):
            self._deposed_ns.append(now_ns)
            return [*effects, self._depose(now_ns, item.create_revision)]
        return effects

    def _may_lead(self) -> bool:
        return self._view.is_loaded and self._membership.is_alive

    def _settle_term(self) -> list[CoordinatorEffect]:
        """Begin or end to lead by what the view and the membership say."""
        item, before = self._view.leader_item, self.term
        if not self._may_lead():
            self.term = 0
        elif item is None:
            self.term = 0 if self._view.revision >= self.term else self.term
        elif item.lease_id == self._membership.lease_id:
            self.term = item.create_revision
        elif item.create_revision > self.term:
            self.term = 0
        if self.term == before:
            return []
        assert not self.term or self._membership.lease_id
        member = self._membership.member
        if self.term:
            return [Notice(f"cluster: {member} is the coordinator, term {self.term}")]
        return [Notice(f"cluster: {member} is no longer the coordinator, term {before}")]

    def _submit(self, now_ns: int, asked: _Asked, txn: Txn) -> Submit:
        self._asked = asked
        self._tag = Tag(COORDINATOR, self._tag.number + 1)
        self._is_waiting = True
        self._until_ns = now_ns + ANSWER_NS_MAX
        return Submit(self._tag, txn)

    def _campaign(self, now_ns: int) -> Submit:
        put = self._own_key()
        txn = Txn((if_absent(put.key),), (put,), (Range(put.key),))
        return self._submit(now_ns, _Asked.CAMPAIGN, txn)

    def _own_key(self) -> Put:
        value = encode_record(LeaderRecord(member=self._membership.member))
        return Put(self._view.keys.leader, value, self._membership.lease_id)

    def _depose(self, now_ns: int, create_revision: int) -> Submit:
        key = self._view.keys.leader
        compare = if_created_at(key, create_revision)
        return self._submit(now_ns, _Asked.DEPOSE, Txn((compare,), (Delete(key),), (Range(key),)))

    def _answered(self, now_ns: int, result: StoreResult) -> list[CoordinatorEffect]:
        """Take the answer to a campaign, a deposition, or the beginning or end of a plan.

        An unknown outcome needs nothing here: the next campaign compares that the key is absent and
        otherwise reads it, and a key under our own lease is ours.
        """
        self._until_ns = now_ns + RETRY_NS
        if self._asked is _Asked.PLAN:
            return self._plan_answered(now_ns, result)
        if not isinstance(result, TxnResult):
            return [Notice(f"cluster: no answer to a campaign: {result}")]
        if not result.succeeded:
            self._view.learn(result.ranges[0].items, result.revision)
            return []
        self._until_ns = now_ns
        if self._asked is _Asked.DEPOSE:
            # The view may still have the old key: it cannot tell that the place is free.
            return [self._campaign(now_ns)] if self._may_lead() else []
        self._view.learn([self._own_item(result.revision)], result.revision)
        return []

    def _plan_answered(self, now_ns: int, result: StoreResult) -> list[CoordinatorEffect]:
        """Each of these transactions compares the plan before it, so it may be asked for again."""
        if not isinstance(result, TxnResult) or not result.succeeded:
            self._plans.failed()
            return []
        self._until_ns = now_ns
        self._plans.written(result.revision)
        return [Notice(self._plan_text)]

    def _own_item(self, revision: int) -> KeyValue:
        put = self._own_key()
        return KeyValue(put.key, put.value, revision, revision, 1, put.lease_id)

    # ---- A coordinator that does nothing

    def _look_at_leader(self, now_ns: int) -> bool:
        """Return whether the leader leaves work undone for so long that it is deposed."""
        item, leader = self._view.leader_item, self._view.leader
        assert item is not None
        member = leader.content.member if leader is not None else None
        if member == self._membership.member:
            return True  # an earlier process of this member, or its earlier lease
        if now_ns < self._late_look_ns:
            return False
        self._late_look_ns = now_ns + LATE_LOOK_NS
        due, late = self._choices.masters_due(now_ns), self._late
        if not due:
            self._late = None
            return False
        is_new = late is None or late.leader_revision != item.create_revision
        if late is None or is_new or len(due) < late.due:
            late = _Late(item.create_revision, now_ns, len(due))
        self._late = late = late._replace(due=len(due))
        limit_ns = LEADER_GONE_NS if member in due.values() else LEADER_LATE_NS
        recent = sum(now_ns - at_ns < DEPOSED_NS for at_ns in self._deposed_ns)
        waits_ns = limit_ns << recent
        if self._ran is not None:
            waits_ns = self._ran.stretched(waits_ns)
        return now_ns - late.since_ns >= waits_ns

    # ---- Writes

    def _lead(self, now_ns: int) -> list[CoordinatorEffect]:
        if not self._writer.is_idle or now_ns < self._look_ns:
            return []
        batch: list[RecordChange] = []
        for change in self._in_turn(now_ns):
            batch.append(change)
            if compares_of(batch) > self._batch_max:
                batch.pop()
                break
        if not batch:
            step = self._plans.due(self.term)
            if step is None:
                if not self._choices.are_any_reported and self._view.plan is None:
                    self._look_ns = now_ns + LOOK_NS
                return []
            self._plan_text = step.text
            return [self._submit(now_ns, _Asked.PLAN, step.txn)]
        guard = Guard(self._view.keys.leader, self.term)
        self._wrote_ns = now_ns
        return self._take_outcomes(now_ns, self._writer.write(now_ns, batch, guard))

    def _in_turn(self, now_ns: int) -> list[RecordChange]:
        """Return what is to be written, what failed last behind the rest."""
        changes = list(self._choices.changes(now_ns))
        self._failed &= {change.vb_id for change in changes}
        return sorted(changes, key=lambda change: change.vb_id in self._failed)

    def _take_outcomes(self, now_ns: int, effects: list[WriterEffect]) -> list[CoordinatorEffect]:
        """Take the outcomes out of the writer's effects, and pass on the rest."""
        passed: list[CoordinatorEffect] = []
        outcomes = []
        for effect in effects:
            if isinstance(effect, WriteOutcome):
                outcomes.append(effect)
                continue
            passed.append(effect)
            if isinstance(effect, ViewChanged):
                self._look_ns = 0
                self._choices.take_view(now_ns, effect.vb_ids)
        if not outcomes:
            return passed
        vb_ids = {outcome.change.vb_id for outcome in outcomes}
        if outcomes[0].kind is OutcomeKind.WRITTEN:
            took_ns = now_ns - self._wrote_ns
            if took_ns > BATCH_NS:
                self._batch_max = max(self._batch_max // 2, min(self._batch_max, BATCH_SLOW_MIN))
                self._until_ns = now_ns + took_ns
            else:
                self._batch_max = min(2 * self._batch_max, COMPARES_MAX)
            self._failed -= vb_ids
            return [*passed, *(told for outcome in outcomes for told in _elected(outcome.change))]
        # One record that changes all the time must not hold up the others: fewer at a time, and
        # the others first.
        self._batch_max = max(self._batch_max // 2, BATCH_MIN)
        self._failed = self._failed | vb_ids if vb_ids - self._failed else vb_ids
        self._until_ns = now_ns + RETRY_NS
        return passed


def _elected(change: RecordChange) -> list[Elected]:
    is_election = change.record.epoch > change.before.content.record.epoch
    return [Elected(change.vb_id, change.record)] if is_election else []
