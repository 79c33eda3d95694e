"""The other checkers, on facts written by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sim.checkers import histories, liveness, membership, streams
from sim.facts import (
    Committed,
    Excuse,
    History,
    Kept,
    Kind,
    Lacking,
    Map,
    Mastership,
    Operation,
    Outcome,
    Overlap,
    RolledBack,
    Streamed,
    fingerprint,
)

A, B = 0xA, 0xB
"""Two versions."""


def written(seqno: int, vb_uuid: int = A, at_ns: int = 5) -> Operation:
    operation = Operation(
        "c", 1, Kind.SET, 0, b"k", b"v", invoked_ns=at_ns, ended_ns=at_ns + 1, outcome=Outcome.OK,
        cas=seqno,
    )  # fmt: skip
    operation.vb_uuid, operation.seqno = vb_uuid, seqno
    return operation


def held(versions: list[tuple[int, int]], changes: dict[int, int], node: str = "n1") -> History:
    return History(100, node, 0, tuple(versions), max(changes, default=0), changes)


class TestLostWrites:
    final = held([(B, 7), (A, 0)], {seqno: fingerprint(seqno, 99) for seqno in range(1, 10)})

    @pytest.mark.parametrize(("seqno", "uuid"), [(1, A), (7, A), (8, B), (9, B)])
    def test_what_is_in_the_history_is_not_lost(self, seqno: int, uuid: int) -> None:
        assert histories.lost_writes([written(seqno, uuid)], [self.final], []) == []

    @pytest.mark.parametrize(("seqno", "uuid"), [(8, A), (10, B), (1, 0xC)])
    def test_what_is_not_is(self, seqno: int, uuid: int) -> None:
        (problem,) = histories.lost_writes([written(seqno, uuid)], [self.final], [])
        assert "lost" in problem

    def test_another_change_with_its_seqno_is_no_substitute(self) -> None:
        operation = written(5)
        operation.cas = 77
        (problem,) = histories.lost_writes([operation], [self.final], [])
        assert "another change" in problem

    def test_a_failover_excuses_writes_without_a_frame(self) -> None:
        """With `acknowledge=master`: what the new master's version began below, and no more."""
        masterships = [Mastership(2, "n1", 1, 0, 1, A), Mastership(20, "n2", 1, 0, 2, B, 7)]
        cuts = histories.failovers(masterships)
        assert histories.lost_writes([written(8)], [self.final], [], cuts) == []
        durable = written(8)
        durable.level = 1
        assert histories.lost_writes([durable], [self.final], [], cuts)
        assert histories.lost_writes([written(8, at_ns=30)], [self.final], [], cuts), "later"
        other = self.final._replace(entries={7: fingerprint(1, 99)})
        assert histories.lost_writes([written(7)], [other], [], cuts[1:]), "below the version"
        handover = Mastership(40, "n1", 1, 0, 3, B, 7)
        assert histories.failovers([*masterships, handover]) == cuts

    def test_what_was_compacted_is_not_lost(self) -> None:
        final = self.final._replace(entries={9: fingerprint(9, 99)})
        assert histories.lost_writes([written(5)], [final], []) == []

    def test_a_partition_that_nobody_holds_is_lost(self) -> None:
        assert histories.lost_writes([written(1)], [], [])

    def test_only_a_cut_below_excuses(self) -> None:
        def lost(excuse: Excuse) -> bool:
            return bool(histories.lost_writes([written(8)], [self.final], [excuse]))

        assert not lost(Excuse(50, 0, 7, "branch"))
        assert lost(Excuse(50, 0, 8, "branch")), "it was not cut off"
        assert lost(Excuse(50, 1, 7, "branch")), "another partition"
        assert lost(Excuse(50, 0, 7, "purge")), "a purge loses no document"
        assert lost(Excuse(1, 0, 7, "branch", until_ns=3)), "written after the branch"

    def test_what_was_not_answered_cannot_be_lost(self) -> None:
        operation = written(8)
        operation.outcome = Outcome.AMBIGUOUS
        assert histories.lost_writes([operation], [self.final], []) == []


class TestDivergence:
    def test_equal_histories_and_prefixes_pass(self) -> None:
        one = held([(B, 2), (A, 0)], {1: 11, 2: 12, 3: 13})
        two = held([(B, 2), (A, 0)], {1: 11, 2: 12}, "n2")
        assert histories.diverged([one, two]) == []

    def test_different_versions_may_differ(self) -> None:
        one = held([(B, 2), (A, 0)], {1: 11, 2: 12, 3: 13})
        two = held([(A, 0)], {1: 11, 2: 12, 3: 99}, "n2")
        assert histories.diverged([one, two]) == []

    def test_compacted_histories_may_have_gaps(self) -> None:
        one = held([(A, 0)], {1: 11, 2: 12, 3: 13})
        two = held([(A, 0)], {2: 12, 3: 13}, "n2")
        assert histories.diverged([one, two]) == []

    def test_another_change_in_the_same_version_is_found(self) -> None:
        one = held([(B, 2), (A, 0)], {1: 11, 2: 12, 3: 13})
        two = held([(B, 2), (A, 0)], {1: 11, 2: 12, 3: 99}, "n2")
        (problem,) = histories.diverged([one, two])
        assert "seqno 3 on n1" in problem

    def test_a_version_with_two_beginnings_is_found(self) -> None:
        one = held([(B, 2), (A, 0)], {1: 11, 2: 12})
        two = held([(B, 1), (A, 0)], {1: 11}, "n2")
        assert any("began at" in problem for problem in histories.diverged([one, two]))


class TestMasters:
    def test_one_node_may_serve_an_epoch_again(self) -> None:
        lives = [Mastership(at, "n1", at, 0, 3, A) for at in range(3)]
        others = [Mastership(9, "n2", 0, 0, 4, A), Mastership(9, "n2", 0, 1, 3, A)]
        assert histories.masters([*lives, *others]) == []

    def test_two_nodes_may_not(self) -> None:
        both = [Mastership(1, "n1", 0, 0, 3, A), Mastership(2, "n2", 0, 0, 3, A)]
        assert len(histories.masters(both)) == 1


class TestRollbacks:
    event = RolledBack(10, "w1", 0, 8, 5)
    to_zero = event._replace(to_seqno=0)

    @pytest.mark.parametrize(("snap_end", "is_allowed"), [(13, True), (12, False), (0, False)])
    def test_a_part_of_a_snapshot_that_history_cut(self, snap_end: int, is_allowed: bool) -> None:
        events = [self.to_zero._replace(snap_end=snap_end)]
        assert (histories.rollbacks(events, [Excuse(9, 0, 12, "branch")]) == []) is is_allowed

    @pytest.mark.parametrize(
        "excuse", [Excuse(9, 0, 5, "branch"), Excuse(9, 0, 7, "unclean election")]
    )
    def test_with_a_cause(self, excuse: Excuse) -> None:
        assert histories.rollbacks([self.event], [excuse]) == []

    @pytest.mark.parametrize(
        "excuse",
        [Excuse(11, 0, 5, "branch"), Excuse(9, 1, 5, "branch"), Excuse(9, 0, 8, "branch")],
    )
    def test_without_one(self, excuse: Excuse) -> None:
        assert len(histories.rollbacks([self.event], [excuse])) == 1

    def test_a_purge_sends_who_is_below_it_to_zero(self) -> None:
        purge = Excuse(9, 0, 9, "purge")
        assert histories.rollbacks([self.to_zero], [purge]) == []
        assert histories.rollbacks([self.event], [purge])
        assert histories.rollbacks([self.to_zero], [purge._replace(to_seqno=8)])


class TestStreams:
    committed = (Committed(10, "n1", 0, A, 5), Committed(20, "n1", 0, A, 8))

    @pytest.mark.parametrize(("at_ns", "seqno"), [(10, 5), (15, 3), (20, 8), (99, 8)])
    def test_committed_changes_may_be_seen(self, at_ns: int, seqno: int) -> None:
        assert streams.uncommitted([Streamed(at_ns, "w1", 0, A, seqno)], self.committed) == []

    @pytest.mark.parametrize(
        ("at_ns", "vb_id", "uuid", "seqno"),
        [(9, 0, A, 1), (15, 0, A, 6), (99, 0, A, 9), (99, 0, B, 1), (99, 1, A, 1)],
    )
    def test_others_may_not(self, at_ns: int, vb_id: int, uuid: int, seqno: int) -> None:
        event = Streamed(at_ns, "w1", vb_id, uuid, seqno)
        assert len(streams.uncommitted([event], self.committed)) == 1

    def test_maps(self) -> None:
        master = Map("the master", {b"a": b"1", b"b": b"2"})
        assert streams.maps(master, [Map("w1", dict(master.documents))]) == []
        for documents in ({b"a": b"1"}, {**master.documents, b"c": b"3"}, {b"a": b"9", b"b": b"2"}):
            assert len(streams.maps(master, [Map("w1", documents)])) == 1

    def test_many_differences_are_counted(self) -> None:
        master = Map("the master", {b"%d" % number: b"" for number in range(50)})
        problems = streams.maps(master, [Map("w1", {})])
        assert len(problems) == streams.DIFFERENCES_MAX + 1
        assert "50 keys" in problems[-1]


class TestLiveness:
    def test_answers_after_the_faults(self) -> None:
        refused = written(1, at_ns=150)
        refused.outcome = Outcome.REFUSED
        assert liveness.late([refused], 151) == [], "too soon to tell"
        (problem,) = liveness.late([refused], 150)
        assert "was not answered" in problem

    def test_durable_writes_where_copies_cannot_keep_up(self) -> None:
        refused = written(1, at_ns=150)
        refused.outcome, refused.why = Outcome.REFUSED, liveness.WITHOUT_COPIES
        assert len(liveness.late([refused], 150)) == 1
        assert liveness.late([refused], 150, copies_keep_up=False) == []

    def test_operations_that_never_end(self) -> None:
        waiting = written(1)
        waiting.ended_ns = waiting.outcome = None
        (problem,) = liveness.late([waiting], 150)
        assert "never ended" in problem


class TestMembership:
    def test_a_member_that_lacks_what_is_committed(self) -> None:
        (problem,) = membership.lacking([Lacking(10, "n2", 0, 3, "n1", A, 4)])
        assert "n2 is in the in-sync set of vb 0" in problem

    def test_two_nodes_that_answer_at_once(self) -> None:
        found = [Overlap(10, 0, ("n1", "n2")), Overlap(11, 0, ("n1", "n2"))]
        (problem,) = membership.overlaps(found, [])
        assert "n1 and n2 answer for vb 0" in problem
        assert membership.overlaps(found, [Excuse(5, 0, 3, "unclean")]) == []
        assert membership.overlaps(found, [Excuse(5, 1, 3, "unclean"), Excuse(5, 0, 3, "branch")])

    @pytest.mark.parametrize(
        ("at_ms", "is_found"),
        [((0, 40, 80), False), (range(0, 400, 40), True), ((0, 40, 600, 640), False)],
    )
    def test_a_stream_that_a_replaced_master_keeps(
        self, at_ms: Iterable[int], is_found: bool
    ) -> None:
        found = [Kept(ms * 1_000_000, "n1", 0, "n1<w1#1", "n2", 0) for ms in at_ms]
        problems = membership.kept(found)
        assert len(problems) == is_found
        assert membership.kept(
            [item._replace(connection=f"n1<w1#{at}") for at, item in enumerate(found)]
        ) == []  # fmt: skip


def test_tail_that_was_not_committed_belongs_to_one_history_too() -> None:
    """Also where a version's changes are not committed, no other node has others in it."""
    committed = held([(A, 0)], {1: fingerprint(1, 9), 2: fingerprint(2, 9)})
    tail = History(50, "n2", 0, ((A, 0),), 3, {}, {2: 2, 3: 3})
    assert histories.diverged([committed, tail]) == []
    assert histories.diverged([committed, tail._replace(tail={2: 77})])
    assert histories.diverged([tail, tail._replace(node="n1", tail={3: 78})])
    assert histories.diverged([tail, tail._replace(versions=((B, 2), (A, 0)), tail={3: 78})]) == []
