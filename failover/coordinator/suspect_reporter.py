"""Writes a member's report: the partitions whose master it does not hear. Pure.

The report is one key under the member's lease. While it names partitions it is written again every
REPEAT_NS, because a report counts for a bounded time only
(`failover.rules.election.REPORT_VALID_NS`).

Each write compares the key's mod revision, and the key is not deleted: a report without partitions
takes its place. So a write that comes late cannot bring an old report back.

Who calls it: the node's session with the store.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from failover.coordinator.cluster_keys import ClusterKeys, KeyKind
from failover.coordinator.cluster_records import MemberReport, ReportedPartition, encode_record
from failover.coordinator.effects import (
    ANSWER_NS_MAX,
    RETRY_NS,
    Answered,
    StoreEffect,
    StoreEvent,
    Submit,
    Tag,
    Tick,
)
from failover.coordinator.membership import Membership
from failover.metadata.metastore import Put, Range, Txn, TxnResult, if_unchanged

REPEAT_NS: Final = 500_000_000
"""How often a report is repeated: four times while it counts."""
REPORTER: Final = "reporter"

ReporterEffect: TypeAlias = StoreEffect


class SuspectReporter:
    """See the module."""

    def __init__(self, keys: ClusterKeys, membership: Membership) -> None:
        self._membership = membership
        self._key = keys.of_member(KeyKind.SUSPECT, membership.member)
        self._wanted: tuple[ReportedPartition, ...] = ()
        self._written: tuple[ReportedPartition, ...] | None = None
        """What the store has under the present lease; None: unknown."""
        self._lease_id = 0
        self._mod_revision = 0
        self._asked: tuple[ReportedPartition, ...] = ()
        self._is_waiting = False
        self._next_ns = 0
        """When a missing answer counts as none, or when to write again."""
        self._tag = Tag(REPORTER, 0)

    def report(
        self, now_ns: int, partitions: tuple[ReportedPartition, ...]
    ) -> list[ReporterEffect]:
        """Take the partitions to report from now on, with their present ends; () for none."""
        self._wanted = partitions
        return self._step(now_ns)

    def begin_again(self) -> None:
        """The store may be another one: what it has of this member's report is not known."""
        self._written = None

    def on_event(self, now_ns: int, event: StoreEvent) -> list[ReporterEffect]:
        """Take one event; return what to do."""
        if isinstance(event, Answered) and event.tag == self._tag and self._is_waiting:
            self._is_waiting = False
            self._answered(now_ns, event)
        elif isinstance(event, Tick) and self._is_waiting and now_ns >= self._next_ns:
            self._is_waiting, self._written = False, None
        return self._step(now_ns)

    def _answered(self, now_ns: int, event: Answered) -> None:
        result = event.result
        self._written = None
        if not isinstance(result, TxnResult):
            self._next_ns = now_ns + RETRY_NS
        elif result.succeeded:
            self._written = self._asked
            self._mod_revision = result.revision
            self._next_ns = now_ns + REPEAT_NS
        else:
            found = result.ranges[0].items
            self._mod_revision = found[0].mod_revision if found else 0
            self._next_ns = now_ns

    def _step(self, now_ns: int) -> list[ReporterEffect]:
        if self._is_waiting or not self._membership.is_alive:
            return []
        if self._membership.lease_id != self._lease_id:
            self._lease_id, self._written, self._next_ns = self._membership.lease_id, None, now_ns
        has_news = self._written is not None and self._wanted != self._written
        must_repeat = self._written is None or bool(self._wanted)
        if has_news or (must_repeat and now_ns >= self._next_ns):
            return [self._submit(now_ns)]
        return []

    def _submit(self, now_ns: int) -> Submit:
        self._tag = Tag(REPORTER, self._tag.number + 1)
        self._is_waiting = True
        self._asked = self._wanted
        self._next_ns = now_ns + ANSWER_NS_MAX
        report = MemberReport(member=self._membership.member, partitions=self._wanted)
        put = Put(self._key, encode_record(report), self._lease_id)
        compare = if_unchanged(self._key, self._mod_revision)
        return Submit(self._tag, Txn((compare,), (put,), (Range(self._key),)))
