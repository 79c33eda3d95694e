"""The checkers of cuts, scans, hashes and batches, on facts written by hand."""

from __future__ import annotations

from typing import NamedTuple, cast

import pytest

from dcp.wire.hash_reads import KeyVersion
from sim.checkers import batches, cuts, shown
from sim.facts import (
    AfterCut,
    Batch,
    CutHeld,
    Damaged,
    Excuse,
    Facts,
    HashesRead,
    Kind,
    Mastership,
    Operation,
    Outcome,
    Repair,
    Scanned,
)
from sim.ledger import Ledger, end_of
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.engine.partition import Partition
from vbucket.native.key_hashes import hash_of_document, hash_of_key

A, B = 0xA, 0xB
"""Two versions."""
ONE = ((A, 0),)


class Log(NamedTuple):
    versions: tuple[tuple[int, int], ...]

    def pairs(self) -> tuple[tuple[int, int], ...]:
        return self.versions


class Part:
    """What a ledger reads of a partition, and its changes."""

    def __init__(self, ledger: Ledger, vb_id: int = 0) -> None:
        self.ledger = ledger
        self.vb_id = vb_id
        self.failover = Log(ONE)
        self.committed_seqno = 0
        self.written: list[bytes] = []

    def set(self, key: bytes, value: bytes, at_ns: int = 0) -> None:
        seqno = self.committed_seqno + 1
        entry = pack_mutation(
            vb_id=self.vb_id,
            key=b"\0" + key,
            value=value,
            cas=100 + seqno,
            seqno=seqno,
            rev_seqno=1,
        )
        self.commit(entry, at_ns)

    def delete(self, key: bytes, at_ns: int = 0) -> None:
        seqno = self.committed_seqno + 1
        entry = pack_deletion(
            vb_id=self.vb_id, key=b"\0" + key, cas=100 + seqno, seqno=seqno, rev_seqno=2
        )
        self.commit(entry, at_ns)

    def commit(self, entry: bytes, at_ns: int) -> None:
        self.committed_seqno += 1
        self.written.append(entry)
        self.tell(at_ns)

    def tell(self, at_ns: int) -> None:
        self.ledger.committed(at_ns, cast("Partition", self), self)

    def entries(self, _part: Partition, first: int, last: int, _bytes_max: int) -> list[bytes]:
        return self.written[first - 1 : last]


@pytest.fixture
def part() -> Part:
    return Part(Ledger())


def written(
    part: Part, key: bytes, value: bytes, began_ns: int, ended_ns: int, seqno: int = 0
) -> Operation:
    """Return an answered write that is the newest change of a partition, or one with a seqno."""
    found = Operation(
        "c", began_ns, Kind.SET, part.vb_id, key, value, invoked_ns=began_ns, ended_ns=ended_ns,
        outcome=Outcome.OK, cas=100 + (seqno or part.committed_seqno),
    )  # fmt: skip
    found.vb_uuid, found.seqno = A, seqno or part.committed_seqno
    return found


class TestLedger:
    def test_it_has_each_state(self, part: Part) -> None:
        part.set(b"k", b"1")
        part.set(b"l", b"2")
        part.delete(b"k")
        states = [
            {key: change.value for key, change in part.ledger.state(0, ONE, seqno).items()}
            for seqno in range(4)
        ]
        assert states == [{}, {b"k": b"1"}, {b"k": b"1", b"l": b"2"}, {b"l": b"2"}]

    def test_a_branch_begins_another_history(self, part: Part) -> None:
        part.set(b"k", b"1")
        part.set(b"k", b"2")
        part.failover, part.committed_seqno = Log(((B, 1), (A, 0))), 1
        part.written.pop()
        part.set(b"k", b"3", at_ns=9)
        state = part.ledger.state(0, part.failover.versions, 2)
        assert state[b"k"].value == b"3"
        assert part.ledger.state(0, ONE, 2)[b"k"].value == b"2"
        assert [span.log[0][0] for span in part.ledger.spans(0, 5, 10)] == [A, B]
        assert end_of(part.failover.versions, A, 2) == 1

    def test_a_former_master_moves_nothing_back(self, part: Part) -> None:
        part.set(b"k", b"1", at_ns=1)
        former = part.failover
        part.failover = Log(((B, 1), (A, 0)))
        part.set(b"k", b"2", at_ns=2)
        part.failover, part.committed_seqno = former, 1
        part.tell(3)
        (span,) = part.ledger.spans(0, 4, 5)
        assert (span.log[0][0], span.last_seqno) == (B, 2)


class TestScans:
    def problems(
        self, part: Part, documents: dict[bytes, tuple[int, int, int, bytes]]
    ) -> list[str]:
        return shown.scans([Scanned(10, 20, "p1", 0, documents)], part.ledger)

    def test_a_moment_of_its_time_is_shown(self, part: Part) -> None:
        part.set(b"k", b"1", at_ns=5)
        part.set(b"l", b"2", at_ns=15)
        part.set(b"k", b"3", at_ns=25)
        first, second = {b"k": (0, 1, 101, b"1")}, {b"l": (0, 2, 102, b"2")}
        assert self.problems(part, first) == []
        assert self.problems(part, first | second) == []
        (problem,) = self.problems(part, second)
        assert "b'k' is b'1' of seqno 1" in problem
        assert self.problems(part, {b"k": (0, 3, 103, b"3")} | second), "came later"
        assert self.problems(part, {}), "was there before"


class TestHashes:
    def answer(self, seqno: int, documents: int, sums: int) -> HashesRead:
        return HashesRead(10, 20, "p1", 0, A, seqno, documents, sums.to_bytes(8, "big"), None)

    def test_a_sum_is_that_of_a_recount(self, part: Part) -> None:
        part.set(b"k", b"1", at_ns=5)
        part.set(b"l", b"1", at_ns=15)
        sum_ = hash_of_document(hash_of_key(b"k"), 101, 1)
        assert shown.hashes([self.answer(1, 1, sum_)], [], part.ledger) == []
        assert "it counts" in shown.hashes([self.answer(1, 2, sum_)], [], part.ledger)[0]
        assert "recount" in shown.hashes([self.answer(1, 1, sum_ + 1)], [], part.ledger)[0]
        assert "where it was not" in shown.hashes([self.answer(3, 2, 0)], [], part.ledger)[0]

    def test_a_version_may_be_told_as_of_its_end(self, part: Part) -> None:
        """Its successor begins there. It did not have what that one wrote."""
        part.set(b"k", b"1", at_ns=5)
        part.failover = Log(((B, 1), (A, 0)))
        part.tell(6)
        part.set(b"k", b"2", at_ns=15)
        sum_ = hash_of_document(hash_of_key(b"k"), 101, 1)
        assert shown.hashes([self.answer(1, 1, sum_)], [], part.ledger) == []
        assert "where it was not" in shown.hashes([self.answer(2, 1, 0)], [], part.ledger)[0]

    def test_keys_are_those_of_the_seqno(self, part: Part) -> None:
        part.set(b"k", b"1", at_ns=5)
        versions = [KeyVersion(b"k", 101, 1, 1)]
        answer = self.answer(1, 1, 0)._replace(versions=versions)
        assert shown.hashes([answer], [], part.ledger) == []
        other = answer._replace(versions=[versions[0]._replace(rev_seqno=2)])
        assert "its keys" in shown.hashes([other], [], part.ledger)[0]


class TestBatches:
    def problems(self, part: Part, outcome: Outcome, *values: bytes) -> list[str]:
        operations = [
            written(part, b"k", value, 1, 2, seqno) for seqno, value in enumerate(values, 1)
        ]
        for each in operations:
            each.cas = 100 + each.seqno
        batch = Batch("b", operations)
        batch.outcome = outcome
        return batches.torn([batch], part.ledger, [])

    def test_all_or_none_is_made(self, part: Part) -> None:
        part.set(b"k", b"1")
        part.set(b"k", b"2")
        assert self.problems(part, Outcome.OK, b"1", b"2") == []
        assert self.problems(part, Outcome.AMBIGUOUS, b"1", b"2") == []
        assert self.problems(part, Outcome.AMBIGUOUS, b"3", b"4") == []
        assert "a part of" in self.problems(part, Outcome.AMBIGUOUS, b"1", b"3")[0]
        assert "was refused" in self.problems(part, Outcome.REFUSED, b"1", b"2")[0]
        assert self.problems(part, Outcome.OK, b"3", b"4")

    def test_a_branch_may_undo_what_was_not_committed(self, part: Part) -> None:
        batch = Batch("b", [written(part, b"k", b"1", 1, 2, 1)])
        batch.outcome = Outcome.OK
        assert batches.torn([batch], part.ledger, [])
        assert batches.torn([batch], part.ledger, [Excuse(1, 0, 0, "branch")]) == []


class TestCuts:
    def broken(self, ledger: Ledger, *operations: Operation, **ends: int) -> list[str]:
        facts = Facts()
        facts.ledger, facts.operations = ledger, list(operations)
        positions = {int(name[2:]): (ONE, seqno) for name, seqno in ends.items()}
        documents = {
            vb_id: {
                key: change.value or b"" for key, change in ledger.state(vb_id, ONE, seqno).items()
            }
            for vb_id, (_, seqno) in positions.items()
        }
        facts.cuts.append(CutHeld(50, "x1", "x1>n1", 7, positions, documents))
        return cuts.broken(facts)

    def test_what_was_answered_before_is_in_it(self) -> None:
        first, second = Part(Ledger()), Part(Ledger(), 1)
        second.ledger = first.ledger
        first.set(b"k", b"1")
        before = written(first, b"k", b"1", 1, 5)
        second.set(b"l", b"2")
        after, beside = written(second, b"l", b"2", 6, 9), written(second, b"l", b"2", 4, 9)
        assert self.broken(first.ledger, before, after, vb0=1, vb1=1) == []
        assert self.broken(first.ledger, before, after, vb0=1, vb1=0) == []
        (problem,) = self.broken(first.ledger, before, after, vb0=0, vb1=1)
        assert "lacks what was answered before" in problem
        assert self.broken(first.ledger, before, beside, vb0=0, vb1=1) == []
        assert self.broken(first.ledger, before, after, vb1=1) == [], "no part of the cut"

    def test_what_a_later_master_answered_before_is_in_it(self) -> None:
        """A former master that does not know of it yet has no part in the cut."""
        first, second = Part(Ledger()), Part(Ledger(), 1)
        second.ledger = first.ledger
        first.set(b"k", b"1")
        first.failover = Log(((B, 1), (A, 0)))
        first.set(b"k", b"2")
        before = written(first, b"k", b"2", 1, 5)
        before.vb_uuid = B
        second.set(b"l", b"2")
        after = written(second, b"l", b"2", 6, 9)
        assert "lacks" in self.broken(first.ledger, before, after, vb0=1, vb1=1)[0]
        assert self.broken(first.ledger, before, after, vb0=2, vb1=1) == [], "it was cut off"

    def test_documents_are_those_of_its_positions(self, part: Part) -> None:
        part.set(b"k", b"1")
        facts = Facts()
        facts.ledger = part.ledger
        facts.cuts.append(CutHeld(50, "x1", "x1>n1", 7, {0: (ONE, 1)}, {0: {b"k": b"0"}}))
        (problem,) = cuts.broken(facts)
        assert "b'k' was b'1'" in problem

    def test_what_follows_has_a_later_cas(self) -> None:
        facts = Facts()
        facts.after_cuts.append(AfterCut(5, "x1", 0, b"k", 2, 6, 7))
        assert "with CAS 6" in cuts.broken(facts)[0]
        facts.masterships = [Mastership(1, node, 0, 0, 1, A, 0) for node in ("n1", "n2")]
        assert cuts.broken(facts) == [], "the other node may have made it"
        facts.masterships.pop()
        assert cuts.broken(facts)
        facts.after_cuts = [facts.after_cuts[0]._replace(key=b"m1")]
        assert cuts.broken(facts) == [], "a CAS from elsewhere"


@pytest.mark.parametrize("put", [True, False, None])
def test_what_is_put_in_place_has_to_be_what_was_there(put: bool | None) -> None:
    version = {3: (b"k", 9)}
    found = shown.repairs([Repair(1, "n1", "n2", 0, version, version, put)])
    assert ["its block is not what it was" in each for each in found] == [True] * (put is False)


def test_damage_is_mended_to_the_byte_or_named() -> None:
    def page(ended: str, *, named: str = "", must_mend: bool = False) -> Damaged:
        damaged = Damaged(0, "n1", "by_key", b"\0\1key", "flip")
        damaged.ended, damaged.named, damaged.must_mend = ended, named, must_mend
        return damaged

    put_wrong, told = page(""), page("mended alone")
    put_wrong.is_put_wrong = True
    told.told_mended = "versions were taken"
    of_copy = page(shown.NAMED, named="a merge names it", must_mend=True)
    of_copy.provers = frozenset({"n2"})
    for each, words in (
        (page(shown.PUT_RIGHT), "neither mended nor named"),
        (page(shown.PUT_RIGHT, named="it is", must_mend=True), "not mended in time"),
        (page(shown.NAMED, named="a merge names it", must_mend=True), "not mended in time"),
        (put_wrong, "something else was put in its place"),
        (told, "it counts as mended (versions were taken), and is not"),
    ):
        (problem,) = shown.damages([each])
        assert words in problem
    fine = [page("mended alone", must_mend=True), page(shown.PUT_RIGHT, named="it is"), page("")]
    fine += [page(shown.NAMED, named="it is"), of_copy]
    assert shown.damages(fine) == []
