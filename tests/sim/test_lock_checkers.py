"""The checkers of locks, maxTTL, keeps and OBSERVE_SEQNO, on facts written by hand."""

from __future__ import annotations

import random

import pytest

from sim.checkers import keeps, linearizable, locks, observed
from sim.checkers.expiries import Expiries
from sim.facts import (
    Committed,
    Excuse,
    Facts,
    History,
    Kind,
    Mastership,
    Observed,
    Operation,
    Outcome,
)
from sim.plan import Plan, drawn
from sim.reached import OF_LOCKS, reached
from sim.world import SECOND
from vbucket.model.consumer_documents import checkpoint_key, keep_key

K = Kind
O = Outcome  # noqa: E741 - histories are tables
LOCK, OTHER = 99, 98
"""The CAS of a lock, and another one."""
A, B = 0xA, 0xB
"""Two versions."""


def plan(*faults: str) -> Plan:
    return drawn(random.Random(1))._replace(
        faults=faults, drift_ppm=0, nodes=1, acknowledge="committed"
    )


def operation(
    kind: Kind, at_s: float, outcome: Outcome = O.OK, *, cas: int = 0, asked: int = 0,
    value: bytes | None = None, collection: int = 0,
) -> Operation:  # fmt: skip
    began_ns = int(at_s * SECOND)
    made = Operation(
        "c", int(at_s * 1000), kind, 0, b"l0", b"v" if kind is K.SET else b"", cas=cas,
        cas_asked=asked, collection=collection, invoked_ns=began_ns, ended_ns=began_ns + 1000,
        outcome=outcome, value=value,
    )  # fmt: skip
    made.lock_cas = asked if asked in {LOCK, OTHER} else 0
    made.locked_value = b"v" if made.lock_cas else None
    return made


def taken(at_s: float, seconds: int = 1, cas: int = LOCK) -> Operation:
    made = operation(K.GET_AND_LOCK, at_s, value=b"v")
    made.lock_s, made.lock_cas = seconds, cas
    return made


def shown(at_s: float, *, is_locked: bool) -> Operation:
    made = operation(K.GET, at_s, value=b"v", cas=0 if is_locked else 5)
    made.is_locked = is_locked
    return made


def refused(at_s: float, kind: Kind = K.SET, outcome: Outcome = O.LOCKED) -> Operation:
    return operation(kind, at_s, outcome)


GOOD = {
    "who has the CAS changes it": [taken(1), operation(K.SET, 1.5, asked=LOCK)],
    "who has it unlocks it, and then others change it": [
        taken(1), operation(K.UNLOCK, 1.2, asked=LOCK), operation(K.SET, 1.3),
    ],
    "others are refused, and see that it is locked": [
        taken(1), refused(1.1), refused(1.2, K.GET_AND_LOCK), shown(1.3, is_locked=True),
    ],
    "it is over after its time": [taken(1), operation(K.SET, 2.1), shown(2.2, is_locked=False)],
    "what was asked before it was there may be made": [operation(K.SET, 0.9999999), taken(1)],
    "a GET_AND_LOCK without an answer may lock": [
        operation(K.GET_AND_LOCK, 1, O.AMBIGUOUS), refused(9),
    ],
    "an UNLOCK without an answer may unlock": [
        taken(1), operation(K.UNLOCK, 1.2, O.AMBIGUOUS, asked=LOCK), operation(K.SET, 1.3),
    ],
    "its CAS is worth nothing afterwards": [
        taken(1), operation(K.SET, 2.1, O.EXISTS, asked=LOCK),
        operation(K.UNLOCK, 2.2, O.NOT_LOCKED, asked=LOCK),
    ],
}  # fmt: skip
BAD = {
    "a locked document was changed": [taken(1), operation(K.SET, 1.5)],
    "a locked document was locked again": [taken(1), taken(1.5, cas=OTHER)],
    "a locked document showed its CAS": [taken(1), shown(1.5, is_locked=False)],
    "a document is called locked, and no lock is there": [taken(1), refused(2.1)],
    "a lock that was over let this pass": [taken(1), operation(K.SET, 2.1, asked=LOCK)],
    "an UNLOCK was made with a CAS that is none of a lock": [
        taken(1), operation(K.UNLOCK, 1.5, asked=OTHER),
    ],
    "the CAS of a lock did not open it": [
        taken(1), operation(K.UNLOCK, 1.5, O.NOT_LOCKED, asked=LOCK),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_locks_that_are_kept_pass(name: str) -> None:
    assert locks.broken(GOOD[name], [], [], plan()) == []


@pytest.mark.parametrize("words", BAD)
def test_what_a_lock_does_not_allow_is_named(words: str) -> None:
    problems = locks.broken(BAD[words], [], [], plan())
    assert [each.partition(":")[0] for each in problems] == [words]


def test_a_lock_that_was_opened_is_over() -> None:
    opened = [taken(1, 2), operation(K.UNLOCK, 1.2, asked=LOCK), refused(1.5)]
    (problem,) = locks.broken(opened, [], [], plan())
    assert "no lock is there" in problem


def test_a_document_that_nobody_locked_is_not_called_so() -> None:
    (problem,) = locks.broken([refused(1)], [], [], plan())
    assert "no lock is there" in problem


def test_a_master_and_a_branch_may_end_a_lock() -> None:
    changed = [taken(1), operation(K.SET, 1.5)]
    at_ns = int(1.3 * SECOND)
    mastership = Mastership(at_ns, "n2", 0, 0, 2, B)
    assert locks.broken(changed, [mastership], [], plan()) == []
    assert locks.broken(changed, [mastership._replace(vb_id=1)], [], plan())
    assert locks.broken(changed, [mastership._replace(at_ns=SECOND // 2)], [], plan())
    branch = Excuse(at_ns, 0, 0, "branch", at_ns)
    assert locks.broken(changed, [], [branch], plan()) == []
    assert locks.broken(changed, [], [branch._replace(kind="purge")], plan())


def test_where_clocks_jump_nobody_knows_when_a_lock_is_over() -> None:
    assert locks.broken([taken(1), refused(9)], [], [], plan("clock_jump")) == []
    assert locks.broken([taken(1), operation(K.SET, 1.5)], [], [], plan("clock_jump")) == []


class TestRegister:
    """What the CAS of a lock opens is the value that was locked."""

    first = operation(K.SET, 0.5, cas=5)

    def verdict(self, *operations: Operation) -> list[str]:
        return linearizable.check([self.first, *operations], [])[0]

    def test_the_cas_of_a_lock_opens_what_was_locked(self) -> None:
        assert self.verdict(taken(1), operation(K.SET, 1.2, cas=6, asked=LOCK)) == []

    def test_and_nothing_else(self) -> None:
        between = operation(K.REPLACE, 1.1, cas=6)
        between.argument = b"w"
        assert self.verdict(taken(1), between, operation(K.SET, 1.2, cas=7, asked=LOCK))

    def test_a_lock_shows_what_is_there(self) -> None:
        other = taken(1)
        other.value = b"w"
        assert self.verdict(other)
        assert self.verdict(taken(1), shown(1.1, is_locked=True)) == []


class TestMaxTtl:
    def stored(self, *, expiry_s: int = 0, max_ttl_s: int = 1) -> Operation:
        made = operation(K.SET, 1, cas=5, collection=8)
        made.expiry_s, made.max_ttl_s = expiry_s, max_ttl_s
        return made

    def late(self, *operations: Operation) -> list[str]:
        read = operation(K.GET, 2.5, cas=5, value=b"v", collection=8)
        return Expiries(plan()).overdue([*operations, read])

    @pytest.mark.parametrize("expiry_s", [0, 1, 99])
    def test_a_document_is_due_after_it_at_last(self, expiry_s: int) -> None:
        (problem,) = self.late(self.stored(expiry_s=expiry_s))
        assert "expired document is answered" in problem
        assert self.late(self.stored(expiry_s=expiry_s, max_ttl_s=2)) == [] or expiry_s == 1

    def test_without_one_it_lasts(self) -> None:
        assert self.late(self.stored(max_ttl_s=0)) == []


class TestObserved:
    def facts(self, seen: Observed, *, node: str = "") -> Facts:
        facts = Facts()
        write = operation(K.SET, 1, cas=5)
        write.vb_uuid, write.seqno = A, 4
        asked = operation(K.OBSERVE, 2)
        asked.observed, asked.vb_uuid, asked.node = seen, seen.asked_uuid, node
        facts.operations += [write, asked]
        facts.committed += [Committed(SECOND, "n1", 0, A, 5), Committed(SECOND, "n1", 0, B, 6)]
        facts.masterships.append(Mastership(0, "n1", 0, 0, 1, A))
        facts.histories.append(History(9 * SECOND, "n1", 0, ((B, 5), (A, 0)), 9, {}))
        facts.final = facts.histories
        return facts

    @pytest.mark.parametrize(
        "seen", [Observed(A, A, 4, 4, None), Observed(A, A, 5, 5, None), Observed(A, B, 6, 6, 5)]
    )
    def test_what_is_so_passes(self, seen: Observed) -> None:
        assert observed.wrong(self.facts(seen), plan()) == []

    @pytest.mark.parametrize(
        ("seen", "words"),
        [
            (Observed(A, A, 5, 4, None), "is persisted, and only 4 is committed"),
            (Observed(A, A, 6, 6, None), "only 5 was committed"),
            (Observed(A, A, 3, 3, None), "lacks what was answered before"),
            (Observed(A, A, 3, 4, None), "lacks what was answered before"),
            (Observed(A, 0xC, 4, 4, 4), "a version that nobody served"),
            (Observed(A, B, 6, 6, 6), "ended at 6, and it ended at 5"),
            (Observed(A, B, 6, 6, None), "does not tell whether"),
        ],
    )
    def test_what_is_not_so_is_named(self, seen: Observed, words: str) -> None:
        (problem,) = observed.wrong(self.facts(seen), plan())
        assert words in problem

    def test_a_replica_tells_what_is_on_its_disk(self) -> None:
        seen = Observed(A, A, 6, 6, None)
        assert observed.wrong(self.facts(seen, node="n2"), plan()) == []
        assert observed.wrong(self.facts(seen, node="n1"), plan())

    def test_a_version_that_there_is_is_known(self) -> None:
        facts = self.facts(Observed(A, A, 4, 4, None))
        asked = facts.operations[-1]
        asked.observed, asked.outcome = None, O.ABSENT
        (problem,) = observed.wrong(facts, plan())
        assert "does not know a version" in problem
        asked.vb_uuid = 0xC
        assert observed.wrong(facts, plan()) == []


def test_what_clients_that_lock_were_answered_is_counted() -> None:
    facts = Facts()
    stored = operation(K.SET, 1, cas=5, collection=8)
    stored.max_ttl_s = 1
    asked = operation(K.OBSERVE, 2)
    asked.observed = Observed(A, A, 1, 1, None)
    facts.operations += [taken(1), refused(1.1), refused(1.2, K.UNLOCK), stored, asked]
    facts.operations.append(operation(K.GET, 2.5, O.ABSENT, collection=8))
    found = reached(facts, [], [])
    assert [found.get(name, 0) for name in OF_LOCKS] == [1, 1, 1, 1, 0]


class TestKeeps:
    def stored(self, at_s: float, key: bytes, position: int | None = None) -> Operation:
        made = operation(K.SET, at_s)
        made.key, made.kept_seqno, made.seqno, made.vb_uuid = key, position, 3, A
        return made

    def passed(self, *excuses: Excuse) -> list[str]:
        operations = [self.stored(1, keep_key(0), 0), self.stored(2, checkpoint_key("kept", 0), 7)]
        return keeps.passed(operations, excuses, plan())

    @pytest.mark.parametrize(("at_s", "seqno"), [(0.5, 9), (3, 7), (1.5, 0)])
    def test_a_purge_up_to_the_consumer_passes(self, at_s: float, seqno: int) -> None:
        assert self.passed(Excuse(int(at_s * SECOND), 0, seqno, "purge")) == []

    @pytest.mark.parametrize(("at_s", "seqno"), [(1.5, 1), (3, 8)])
    def test_one_that_goes_beyond_is_named(self, at_s: float, seqno: int) -> None:
        (problem,) = self.passed(Excuse(int(at_s * SECOND), 0, seqno, "purge"))
        assert "passed the consumer" in problem

    def test_a_branch_may_undo_what_was_promised(self) -> None:
        purge = Excuse(3 * SECOND, 0, 8, "purge")
        assert self.passed(purge, Excuse(2 * SECOND, 0, 0, "branch")) == []
        assert self.passed(purge, Excuse(2 * SECOND, 1, 0, "branch"))
