"""The checkers of expiries, revisions, replicas and rollbacks, on facts written by hand."""

from __future__ import annotations

import random

import pytest

from clients.consumer.streams import Batch
from clients.event import Deletion, Rollback, SnapshotStart, StreamOpened
from clients.position import Position
from sim.checkers import histories, linearizable, replica_reads
from sim.checkers.expiries import Expiries
from sim.checkers.falling import Change, falls
from sim.facts import (
    Begun,
    Committed,
    History,
    Kind,
    Operation,
    Outcome,
    RolledBack,
    Streamed,
    fingerprint,
)
from sim.plan import Plan, drawn
from sim.run import Options, Simulation
from sim.world import SECOND

A, B = 0xA, 0xB
"""Two versions."""


def test_a_consumer_tells_of_which_snapshot_it_had_a_part() -> None:
    simulation = Simulation(1, Options())
    consumer = simulation.consumers[0]
    consumer.begin()
    log = ((A, 0),)
    events = [
        StreamOpened(0, log, 0), SnapshotStart(0, 1, 20, 2), Deletion(0, b"k", 11, 1, 1),
        Rollback(0, 0, 0, 11, "cut", log),
    ]  # fmt: skip
    consumer._take(Batch(events, {0: Position()}, 0, {}))
    assert simulation.facts.problems == []
    assert [event[3:] for event in simulation.facts.rolled_back] == [(11, 0, 20)]


def plan(*faults: str) -> Plan:
    return drawn(random.Random(1))._replace(faults=faults, drift_ppm=0)


def operation(
    kind: Kind, at_s: float, outcome: Outcome = Outcome.OK, *, cas: int = 0, expiry_s: int = 0,
    value: bytes | None = None,
) -> Operation:  # fmt: skip
    began_ns = int(at_s * SECOND)
    return Operation(
        "c", int(at_s * 1000), kind, 0, b"t0", b"v" if kind is Kind.SET else b"", cas=cas,
        expiry_s=expiry_s, invoked_ns=began_ns, ended_ns=began_ns + 1000, outcome=outcome,
        value=value,
    )  # fmt: skip


class TestExpiries:
    stored = operation(Kind.SET, 1, cas=5, expiry_s=2)

    def verdicts(self, *operations: Operation, of: Plan | None = None) -> list[str]:
        expiring = Expiries(of or plan())
        found, _ = linearizable.check([*operations, *expiring.events(operations)], [])
        return found + expiring.overdue(operations)

    def test_a_document_expires_when_it_is_due(self) -> None:
        present = operation(Kind.GET, 1.5, cas=5, value=b"v")
        assert self.verdicts(self.stored, present, absent(3.1)) == []

    def test_it_does_not_expire_before(self) -> None:
        (problem,) = self.verdicts(self.stored, absent(1.5))
        assert "not linearizable" in problem

    def test_where_clocks_jump_it_may(self) -> None:
        assert self.verdicts(self.stored, absent(1.5), of=plan("clock_jump")) == []

    def test_it_does_not_come_back(self) -> None:
        again = operation(Kind.GET, 3.2, cas=5, value=b"v")
        (problem,) = self.verdicts(self.stored, absent(3.1), again)
        assert "not linearizable" in problem

    def test_it_is_not_answered_long_after(self) -> None:
        late = operation(Kind.GET, 3.3, cas=5, value=b"v")
        (problem,) = self.verdicts(self.stored, late)
        assert "expired document is answered" in problem

    def test_a_touch_lets_it_live(self) -> None:
        touched = operation(Kind.TOUCH, 2, cas=6, expiry_s=3)
        late = operation(Kind.GET, 4, cas=6, value=b"v")
        assert self.verdicts(self.stored, touched, late) == []
        (problem,) = self.verdicts(self.stored, touched, absent(3.5))
        assert "not linearizable" in problem


def absent(at_s: float) -> Operation:
    return operation(Kind.GET, at_s, Outcome.ABSENT)


class TestLists:
    def verdict(self, *values: bytes) -> list[str]:
        reads = [
            operation(Kind.GET, 2 + at, cas=2 + at, value=value) for at, value in enumerate(values)
        ]
        pushes = []
        for at, text in ((1.0, b'"a"'), (2.5, b'"b"')):
            push = operation(Kind.PUSH, at, cas=2 + (at > 2))
            push.argument = text
            pushes.append(push)
        return linearizable.check([*pushes, *reads], [])[0]

    def test_they_grow_at_the_end(self) -> None:
        assert self.verdict(b'["a"]', b'["a","b"]') == []

    @pytest.mark.parametrize("second", [b'["b"]', b'["b","a"]', b'["a"]'])
    def test_they_lose_nothing(self, second: bytes) -> None:
        assert self.verdict(b'["a"]', second)


class TestFalls:
    def test_revision_and_cas_rise(self) -> None:
        changes = [Change(b"\0t", 1, 1, 5), Change(b"\0t", 3, 2, 9), Change(b"\0u", 4, 1, 10)]
        assert falls("n1", changes, 0) == []

    @pytest.mark.parametrize(("rev_seqno", "cas", "what"), [(2, 12, "revision"), (4, 9, "CAS")])
    def test_what_falls_is_named(self, rev_seqno: int, cas: int, what: str) -> None:
        changes = [Change(b"\0t", 1, 3, 10), Change(b"\0t", 2, rev_seqno, cas)]
        (problem,) = falls("n1", changes, 0)
        assert f"the {what} of" in problem

    def test_a_purged_deletion_is_forgotten(self) -> None:
        changes = [Change(b"\0t", 1, 3, 10, is_deletion=True), Change(b"\0t", 2, 1, 11)]
        assert falls("n1", changes, 1) == []
        assert falls("n1", changes, 0)

    def test_a_cas_from_elsewhere_may_fall(self) -> None:
        assert falls("n1", [Change(b"\0m", 1, 3, 10), Change(b"\0m", 2, 4, 5)], 0) == []


class TestReplicaReads:
    history = History(
        9, "n1", 0, ((A, 0),), 3, {seqno: fingerprint(seqno, 0) for seqno in (1, 2, 3)}
    )

    def problems(self, committed: int, at_ns: int = 1) -> list[str]:
        read = operation(Kind.GET_REPLICA, 1, cas=2, value=b"v")
        facts = [Committed(at_ns, "n1", 0, A, committed)]
        return replica_reads.uncommitted([read], [self.history], facts)

    def test_what_was_committed_may_be_answered(self) -> None:
        assert self.problems(2) == []

    def test_what_was_not_may_not(self) -> None:
        assert self.problems(1)
        assert self.problems(2, at_ns=2 * SECOND)

    @pytest.mark.parametrize(("began", "is_committed"), [(2, True), (1, False)])
    def test_a_later_version_commits_what_it_goes_on_from(
        self, began: int, is_committed: bool
    ) -> None:
        """Its own history has compacted the change away."""
        read = operation(Kind.GET_REPLICA, 1, cas=2, value=b"v")
        later = History(9, "n2", 0, ((B, began), (A, 0)), 7, {})
        facts = [Committed(1, "n2", 0, B, 5)]
        found = replica_reads.uncommitted([read], [self.history, later], facts)
        assert (found == []) is is_committed


class TestRollbacks:
    final = History(9, "n1", 0, ((B, 5), (A, 0)), 9, {})
    seen = Streamed(1, "w1", 0, A, 7)
    next = Streamed(3, "w1", 0, B, 8)

    def problems(self, *between: RolledBack | Begun) -> list[str]:
        return histories.not_rolled_back([self.seen, *between, self.next], [self.final])

    def test_what_was_cut_off_has_to_be_taken_back(self) -> None:
        (problem,) = self.problems()
        assert "without a rollback" in problem

    def test_a_rollback_or_a_crash_takes_it_back(self) -> None:
        assert self.problems(RolledBack(2, "w1", 0, 7, 5)) == []
        assert self.problems(Begun(2, "w1")) == []
        assert self.problems(Begun(2, "w2"))
