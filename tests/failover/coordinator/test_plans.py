"""Plans on whole clusters of coordinators: what operators ask for is carried out, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from failover.coordinator import partition_choices
from failover.coordinator.partition_choices import (
    FEW_STEPS_NS,
    STEP_NS,
    CoordinatorSettings,
    PartitionChoices,
)
from failover.coordinator.plans import plan_steps
from failover.coordinator.plans.plan import plan_record
from failover.coordinator.plans.plan_steps import plan_changes, progress_of
from failover.coordinator.plans.request_answers import (
    Answer,
    Prepared,
    RequestRefused,
    member_counts,
    was_written,
    why_not_written,
)
from failover.coordinator.plans.requests import (
    cancel,
    drain,
    failover,
    move,
    rebalance,
    remove,
    set_cluster,
    undrain,
)
from failover.coordinator.record_writer import RecordChange
from failover.coordinator.records import (
    AliveRecord,
    KeyKind,
    MemberRecord,
    MemberReport,
    PlanKind,
    PlanRecord,
    StoredPartition,
    encode_partition,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import KeyValue, Put, TxnResult
from failover.rules.replication_record import create, elect
from support.cluster_model import KEYS, PARTITIONS, Cluster, even

# ---- What is asked for happens


def test_steps_are_looked_for_rarely_while_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search looks at all partitions of the plan, and nobody is answered meanwhile."""
    cluster = Cluster()
    looked: list[tuple[int, int]] = []

    def search(*arguments: Any) -> Iterator[RecordChange]:
        found = list(plan_changes(*arguments))
        looked.append((cluster.time.now_ns, len(found)))
        yield from found

    def pauses() -> list[int]:
        return [after_ns - at_ns for (at_ns, _), (after_ns, _) in pairwise(looked)]

    monkeypatch.setattr(partition_choices, "plan_changes", search)
    monkeypatch.setattr(partition_choices, "FEW_STEPS", 8)
    cluster.ask(rebalance(cluster.view, cluster.stamp()))
    cluster.until_done()
    assert [found > 8 for _, found in looked[:2]] == [True, True], looked
    assert all(STEP_NS <= pause_ns < FEW_STEPS_NS for pause_ns in pauses()[:2]), looked
    looked.clear()
    monkeypatch.setattr(partition_choices, "FEW_STEPS", PARTITIONS)
    cluster.ask(drain(cluster.view, "n-d", cluster.stamp()))
    cluster.until_done()
    assert len(looked) > 2
    assert min(pauses()) >= FEW_STEPS_NS, looked


def test_rebalance_evens_copies_and_masters_never_fewer() -> None:
    cluster = Cluster()
    assert cluster.copies()["d"] == 0
    asked = rebalance(cluster.view, cluster.stamp())
    assert isinstance(asked, Prepared)
    counts = {item.name: item for item in member_counts(cluster.view, asked.moves)}
    cluster.ask(asked)
    assert counts["n-d"].copies_after == 9
    assert counts["n-d"].masters_after == 3
    cluster.until_done()
    assert even(cluster.copies(), "abcd", 3 * PARTITIONS)
    assert even(cluster.masters(), "abcd", PARTITIONS)
    assert all(record.master == record.copies[0] for record in cluster.records().values())
    cluster.check_history(3)


RACKS = {"a": "r1", "b": "r1", "c": "r2", "d": "r2"}


def test_rebalance_spreads_copies_over_racks() -> None:
    cluster = Cluster(plain="ab", copies=2, racks=RACKS)
    cluster.ask(rebalance(cluster.view, cluster.stamp()))
    cluster.until_done()
    for record in cluster.records().values():
        assert {RACKS[copy] for copy in record.copies} == {"r1", "r2"}
    assert even(cluster.copies(), "abcd", 2 * PARTITIONS)
    assert even(cluster.masters(), "abcd", PARTITIONS)


def test_missing_copies_are_added_on_other_racks() -> None:
    cluster = Cluster("abc", "a", copies=2, racks=RACKS)
    cluster.run_until(lambda: all(len(record.isr) == 2 for record in cluster.records().values()))
    cluster.until_done()
    for record in cluster.records().values():
        assert {RACKS[copy] for copy in record.copies} == {"r1", "r2"}


def test_a_rebalance_of_an_even_cluster_has_nothing_to_do() -> None:
    cluster = Cluster("abc")
    answer = rebalance(cluster.view, cluster.stamp())
    assert isinstance(answer, Prepared)
    assert (answer.moves, answer.txns) == ((), ())


def test_node_that_joins_beyond_copies_gets_nothing_by_itself() -> None:
    cluster = Cluster()
    before = cluster.records()
    cluster.run(30)
    assert cluster.records() == before


@pytest.mark.parametrize("to", ["n-d", "n-b", "n-a"])
def test_a_partition_moves_to_a_node(to: str) -> None:
    cluster = Cluster()
    assert cluster.record(0).copies == ("a", "b", "c")
    cluster.ask(move(cluster.view, 0, to, cluster.stamp()))
    cluster.until_done()
    record = cluster.record(0)
    wanted = {"n-d": ("d", "b", "c"), "n-b": ("b", "a", "c"), "n-a": ("a", "b", "c")}
    assert (record.copies, record.master) == (wanted[to], to[-1])
    cluster.check_history(3)


def test_a_drained_node_ends_without_copies_and_gets_none() -> None:
    cluster = Cluster()
    cluster.ask(drain(cluster.view, "n-b", cluster.stamp()))
    cluster.until_done()
    assert cluster.copies()["b"] == 0
    assert even(cluster.copies(), "acd", 3 * PARTITIONS)
    assert even(cluster.masters(), "acd", PARTITIONS)
    cluster.check_history(3)
    cluster.nodes["c"].kill()
    cluster.run(20)
    again = rebalance(cluster.view, cluster.stamp())
    assert isinstance(again, Prepared)
    assert not any("b" in each.wanted for each in again.moves)
    cluster.nodes["c"].start()
    cluster.run(5)
    cluster.ask(undrain(cluster.view, "n-b", cluster.stamp()))
    cluster.ask(rebalance(cluster.view, cluster.stamp()))
    cluster.until_done()
    assert even(cluster.copies(), "abcd", 3 * PARTITIONS)


def test_draining_below_copies_leaves_one_less_and_says_so() -> None:
    cluster = Cluster("abc")
    asked = cluster.ask(drain(cluster.view, "n-c", cluster.stamp()))
    assert any("3 copies are wanted and 2 nodes" in note for note in asked.notes)
    cluster.until_done()
    assert all(set(record.copies) == {"a", "b"} for record in cluster.records().values())
    cluster.check_history(2)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1), (1, 4)])
def test_the_number_of_copies_changes_on_a_live_cluster(before: int, after: int) -> None:
    cluster = Cluster(plain="abcd", copies=before)
    cluster.ask(set_cluster(cluster.view, cluster.stamp(), copies=after))
    cluster.until_done()
    assert even(cluster.copies(), "abcd", after * PARTITIONS)
    assert even(cluster.masters(), "abcd", PARTITIONS)
    cluster.check_history(min(before, after))
    cluster.run(20)
    assert even(cluster.copies(), "abcd", after * PARTITIONS), "nothing is added or dropped later"


def test_more_copies_than_nodes_are_said_and_next_node_gets_them() -> None:
    cluster = Cluster("abc")
    asked = cluster.ask(set_cluster(cluster.view, cluster.stamp(), copies=4))
    assert any("4 copies are wanted and 3 nodes" in note for note in asked.notes)
    cluster.run(5)
    assert cluster.copies().total() == 3 * PARTITIONS
    cluster.add("d")
    cluster.run(10)
    assert even(cluster.copies(), "abcd", 4 * PARTITIONS)
    assert even(cluster.masters(), "abcd", PARTITIONS)
    cluster.check_history(3)


# ---- Missing copies are added without a request


def test_two_nodes_that_join_one_get_even_copies_and_masters() -> None:
    cluster = Cluster("a", "a", copies=3)
    cluster.add("b")
    cluster.run(0.4)
    cluster.add("c")
    cluster.run(12)
    assert even(cluster.copies(), "abc", 3 * PARTITIONS)
    assert even(cluster.masters(), "abc", PARTITIONS)
    assert KEYS.plan not in cluster.values()
    cluster.check_history(1)


def test_node_that_is_down_and_holds_nothing_holds_up_no_growth() -> None:
    cluster = Cluster("a", "a", copies=2)
    cluster.join("x")  # it has never run
    cluster.add("b")
    cluster.run(12)
    assert even(cluster.copies(), "ab", 2 * PARTITIONS)


def test_growth_for_a_member_that_was_removed_ends() -> None:
    """Its partitions have enough copies without it: nothing else would end the plan."""
    cluster = Cluster("ab", "ab", copies=2)
    wanted = dict.fromkeys(range(PARTITIONS), ("a", "b", "x"))
    cluster.put_key(
        KEYS.plan, encode_record(plan_record("t", PlanKind.GROW, wanted, members="abx"))
    )
    cluster.run(5)
    assert KEYS.plan not in cluster.values()
    assert even(cluster.copies(), "ab", 2 * PARTITIONS)


def test_copies_of_a_node_that_is_down_stay() -> None:
    cluster = Cluster("abcd", "abc")
    before = cluster.records()
    cluster.nodes["b"].kill()
    cluster.run(60)
    assert {vb: set(record.copies) for vb, record in cluster.records().items()} == {
        vb: set(record.copies) for vb, record in before.items()
    }


def test_an_operators_plan_replaces_an_automatic_one() -> None:
    cluster = Cluster("ab", "a", copies=2, cut="ab")  # b is never filled
    plan = cluster.view.plan
    assert plan is not None
    assert plan.content.kind is PlanKind.GROW
    cluster.ask(set_cluster(cluster.view, cluster.stamp(), copies=1))
    plan = cluster.view.plan
    assert plan is not None
    assert plan.content.kind is PlanKind.SET
    cluster.cuts.clear()
    cluster.until_done()
    assert even(cluster.copies(), "ab", PARTITIONS)


# ---- Interruptions


def test_a_new_coordinator_goes_on_with_a_plan() -> None:
    cluster = Cluster()
    cluster.ask(drain(cluster.view, "n-b", cluster.stamp()))
    cluster.run(0.15)
    leader = cluster.leader()
    cluster.nodes[leader].kill()
    cluster.run(8)
    cluster.nodes[leader].start()
    cluster.until_done()
    assert cluster.copies()["b"] == 0
    assert even(cluster.copies(), "acd", 3 * PARTITIONS)


def test_node_that_is_down_holds_up_only_partitions_that_it_gets() -> None:
    cluster = Cluster("abcde", "abc")
    asked = rebalance(cluster.view, cluster.stamp())
    cluster.nodes["d"].kill()
    moves = cluster.ask(asked).moves
    cluster.run(20)
    told = progress_of(cluster.view)
    assert told is not None
    waiting = sum("d" in each.wanted for each in moves)
    assert (told.partitions, told.done) == (len(moves), len(moves) - waiting)
    assert told.waits_for == {"d": waiting}
    cluster.nodes["d"].start()
    cluster.until_done()
    assert even(cluster.copies(), "abcde", 3 * PARTITIONS)
    cluster.check_history(2)


def test_node_that_dies_while_filled_holds_up_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_steps, "FILLING_MAX", 3)
    monkeypatch.setattr(plan_steps, "FILLING_IN_ALL_MAX", 5)
    cluster = Cluster("abcde", "abc", cut="ad")
    cluster.cuts.update({frozenset("bd"), frozenset("cd")})  # d is filled by nobody
    moves = cluster.ask(rebalance(cluster.view, cluster.stamp())).moves
    cluster.run_until(lambda: sum("d" in each.filling for each in cluster.records().values()) == 3)
    cluster.nodes["d"].kill()
    cluster.run(20)
    told = progress_of(cluster.view)
    assert told is not None
    waiting = sum("d" in each.wanted for each in moves)
    assert (told.done, told.waits_for) == (len(moves) - waiting, {"d": waiting})
    assert all("e" in cluster.record(move.vb_id).isr for move in moves if "e" in move.wanted)
    cluster.ask(cancel(cluster.view, cluster.stamp()))
    cluster.until_done()
    assert not any("d" in record.copies for record in cluster.records().values())
    cluster.check_history(3)


@pytest.mark.parametrize("after_s", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("what", ["rebalance", "drain", "set"])
def test_a_cancelled_plan_leaves_as_many_copies_as_there_were(what: str, after_s: float) -> None:
    cluster = Cluster(cut="ad" if after_s > 0.3 else "")  # some are not filled to the end
    if what == "rebalance":
        cluster.ask(rebalance(cluster.view, cluster.stamp()))
    elif what == "drain":
        cluster.ask(drain(cluster.view, "n-b", cluster.stamp()))
    else:
        cluster.ask(set_cluster(cluster.view, cluster.stamp(), copies=4))
    cluster.run(after_s)
    if cluster.view.plan is not None:
        cluster.ask(cancel(cluster.view, cluster.stamp()))
        cluster.cuts.clear()
        cluster.until_done()
        cluster.run(10)
        assert {len(record.copies) for record in cluster.records().values()} == {3}
        assert cluster.view.cluster is not None
        assert cluster.view.cluster.content.copies == 3
        assert not cluster.view.members["b"].content.is_drained
    assert not any(record.filling for record in cluster.records().values())
    cluster.check_history(3)


def test_a_cancellation_names_partitions_that_did_not_move_yet() -> None:
    """The coordinator may have added a copy that the view of the request does not show."""
    cluster = Cluster()
    asked = set_cluster(cluster.view, cluster.stamp(), copies=4)
    cluster.nodes["d"].kill()  # so no copy can be added
    cluster.ask(asked)
    plan = cluster.view.plan
    assert plan is not None
    asked = cancel(cluster.view, cluster.stamp())
    assert isinstance(asked, Prepared)
    put = asked.txns[0].then[-1]
    assert isinstance(put, Put)
    written = msgspec.json.decode(put.value, type=PlanRecord)
    assert written.wanted().keys() == plan.content.wanted().keys()
    cluster.ask(asked)
    cluster.until_done()
    assert {len(record.copies) for record in cluster.records().values()} == {3}


# ---- Members that go


def test_an_empty_member_is_removed_with_its_name() -> None:
    cluster = Cluster()
    cluster.nodes["d"].kill()
    cluster.ask(remove(cluster.view, "n-d", cluster.stamp()))
    assert not [key for key in cluster.values() if key.endswith((b"/d", b"n-d"))]


def test_dead_member_is_removed_after_its_copies_were_remade() -> None:
    cluster = Cluster()
    cluster.nodes["b"].kill()
    cluster.run(8)
    cluster.ask(remove(cluster.view, "n-b", cluster.stamp()))
    cluster.until_done()
    assert "b" not in cluster.view.members
    assert not [key for key in cluster.values() if key.endswith((b"/b", b"n-b"))]
    assert even(cluster.copies(), "acd", 3 * PARTITIONS)


def test_a_master_fails_over_to_a_copy_in_sync() -> None:
    cluster = Cluster()
    cluster.ask(failover(cluster.view, cluster.stamp(), node="n-a"))
    cluster.until_done()
    assert cluster.masters()["a"] == 0
    assert cluster.copies()["a"] == PARTITIONS
    cluster.check_history(3)


def test_an_unclean_failover_elects_what_is_left() -> None:
    cluster = Cluster("abc", "abc")
    cluster.nodes["c"].kill()
    cluster.run(6)
    for member in "ab":
        cluster.nodes[member].kill()
    cluster.nodes["c"].start()
    cluster.run(10)
    lost = [vb for vb, record in cluster.records().items() if record.master != "c"]
    assert lost
    asked = cluster.ask(failover(cluster.view, cluster.stamp(), node="n-a", is_unclean=True))
    assert "are lost" in asked.notes[0]
    assert "n-a" in asked.notes[1]
    cluster.run(15)
    assert cluster.masters() == {"c": PARTITIONS}


# ---- What is refused changes nothing


def refusal(answer: Answer) -> str:
    assert isinstance(answer, RequestRefused), answer
    assert "\n" not in answer.text
    return answer.text


def test_impossible_requests_are_refused_with_their_reason() -> None:
    cluster = Cluster(min_in_sync=2)
    view, stamp = cluster.view, cluster.stamp()
    before = cluster.values()
    assert "no node 'n-x'" in refusal(drain(view, "n-x", stamp))
    assert "n-a, n-b, n-c, n-d" in refusal(remove(view, "n-x", stamp))
    assert "no partition 99" in refusal(move(view, 99, "n-a", stamp))
    assert "no partition 99" in refusal(failover(view, stamp, vb_id=99))
    assert "5 copies" in refusal(set_cluster(view, stamp, copies=5))
    assert "0 copies" in refusal(set_cluster(view, stamp, copies=0))
    assert "min in-sync 4" in refusal(set_cluster(view, stamp, min_in_sync=4))
    assert "min in-sync 2" in refusal(set_cluster(view, stamp, copies=1))
    assert "-1 s" in refusal(set_cluster(view, stamp, masters_return_s=-1))
    assert "holds copies of 12" in refusal(remove(view, "n-a", stamp))
    assert "no plan is under way" in refusal(cancel(view, stamp))
    told = refusal(failover(view, stamp, node="n-a", is_unclean=True))
    assert "copy in sync" in told
    assert "its lease (its setting `lease`; 3 s by default)" in told  # other settings are possible
    assert cluster.values().keys() == before.keys()


def test_a_node_down_or_drained_gets_no_partition_by_request() -> None:
    cluster = Cluster("abcde")
    cluster.nodes["d"].kill()
    cluster.run(4)
    assert "n-d is down" in refusal(move(cluster.view, 0, "n-d", cluster.stamp()))
    cluster.ask(drain(cluster.view, "n-e", cluster.stamp()))
    cluster.until_done()
    assert "n-e is drained" in refusal(move(cluster.view, 0, "n-e", cluster.stamp()))


def test_a_dead_member_with_the_only_copy_in_sync_is_not_removed() -> None:
    cluster = Cluster("ab", "ab", copies=1)
    cluster.nodes["b"].kill()
    cluster.run(8)
    assert "only copy in sync" in refusal(remove(cluster.view, "n-b", cluster.stamp()))


def test_the_last_node_is_not_drained_and_not_removed() -> None:
    cluster = Cluster("a", "a", copies=1)
    assert "no node that may have copies" in refusal(drain(cluster.view, "n-a", cluster.stamp()))
    assert "the only node" in refusal(remove(cluster.view, "n-a", cluster.stamp()))


def test_a_second_request_is_refused_and_names_the_first() -> None:
    cluster = Cluster()
    view, first, second = cluster.view, cluster.stamp(), cluster.stamp()
    late = rebalance(view, second)
    cluster.nodes["d"].is_paused = True
    cluster.ask(drain(view, "n-b", first))
    assert "drain n-b is under way" in refusal(rebalance(cluster.view, second))
    assert isinstance(late, Prepared)
    result = cluster.store.apply(cluster.time.now_ns, late.txns[0])
    assert isinstance(result, TxnResult)
    assert not result.succeeded
    assert "drain n-b is under way" in why_not_written(cluster.view, result)


def test_a_request_whose_outcome_is_unknown_is_found_by_its_key() -> None:
    cluster = Cluster()
    asked = rebalance(cluster.view, cluster.stamp())
    assert isinstance(asked, Prepared)
    assert not was_written(asked, [])
    cluster.ask(asked)
    items = cluster.view._items
    assert was_written(asked, [items[asked.check_key]])
    other = rebalance(cluster.view, cluster.stamp())
    assert isinstance(other, RequestRefused)


def test_a_plan_that_cannot_be_read_stops_plans_and_nothing_else() -> None:
    cluster = Cluster()
    cluster.put_key(KEYS.plan, b'{"format":1,"operation":"x","kind":"move","members":["a"],'
                               b'"chains":{"0":[0,7]}}')  # fmt: skip
    cluster.run(3)
    assert "cannot have the copies [0, 7]" in refusal(rebalance(cluster.view, cluster.stamp()))
    assert KEYS.plan in cluster.values()
    cluster.nodes["a"].kill()
    cluster.run(8)
    assert cluster.masters()["a"] == 0


def test_cancelling_nothing_or_growth_is_refused() -> None:
    cluster = Cluster("ab", "a", copies=2, cut="ab")
    assert "adds missing copies by itself" in refusal(cancel(cluster.view, cluster.stamp()))


@pytest.mark.parametrize(
    ("alive_at", "reported_at", "after_s"),
    [
        (3, 4, 7.0),
        (6, 7, 2.0),
        (0, 0, None),
        (6, 4, None),  # what it has seen of this store it has not said yet
        (6, 0, None),
    ],
)
def test_copies_move_once_their_master_has_spoken(
    alive_at: int, reported_at: int, after_s: float | None
) -> None:
    """The store may have gone back to a copy, in which the lease of a dead node has not ended."""
    view = ClusterView(KEYS)
    record = elect(create("ab"), "a")
    wanted = plan_record("x", PlanKind.REBALANCE, {0: ("b", "c")})
    stored = StoredPartition(record, "x")
    items = [
        (KEYS.of_partition(KeyKind.PARTITION, 0), encode_partition(stored), 4),
        (KEYS.plan, encode_record(wanted), 4),
    ]
    for name in "abc":
        member = MemberRecord(member=name, address=name)
        items.append((KEYS.of_member(KeyKind.MEMBER, name), encode_record(member), 2))
    for name in "bc":
        alive = AliveRecord(member=name, incarnation=1)
        items.append((KEYS.of_member(KeyKind.ALIVE, name), encode_record(alive), 6))
    if alive_at:
        key = KEYS.of_member(KeyKind.ALIVE, "a")
        items.append((key, encode_record(AliveRecord(member="a", incarnation=1)), alive_at))
    if reported_at:
        report = MemberReport(member="a", partitions=())
        items.append((KEYS.of_member(KeyKind.SUSPECT, "a"), encode_record(report), reported_at))
    choices = PartitionChoices(view, CoordinatorSettings())
    choices.begin_again(10**9, 5 * 10**9)
    view.start_over([KeyValue(key, value, 1, at, 1) for key, value, at in items], 5)
    assert view.begun_revision == 5
    began = [s for s in range(10) if list(choices.changes(10**9 + s * 10**9))]
    assert (began[0] if began else None) == after_s
