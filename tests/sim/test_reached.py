"""What counts as reached: by moments and facts, not by what the plan has drawn."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sim.facts import Excuse, Facts, Kind, Operation, Outcome, RolledBack, Streamed
from sim.moments import STORE, Moment, NodeWatch
from sim.reached import OF_CLUSTERS, reached, table
from vbucket.engine.partition import VbState
from vbucket.model.control import SnapshotWindow


class Told(NamedTuple):
    name: str
    began_ns: int


def record(at_ns: int, kind: str, master: str) -> Moment:
    return Moment(at_ns, kind, STORE, 0, f"epoch 2: master {master}, in-sync set n1, n2")


def test_a_snapshot_is_cut_off_by_the_death_of_its_master_only() -> None:
    begun = Moment(2, "snapshot begun", "n2", 0, "begins a snapshot from 4 to 9")
    done = Moment(3, "snapshot completed", "n2", 0, "")
    name = "snapshots at a master's death"
    made = record(1, "election", "n1")
    dies = Moment(4, "end", "n1", None, "loses power")
    other = Moment(4, "end", "n3", None, "loses power")
    assert reached(Facts(), [made, begun, dies], [])[name] == 1
    assert name not in reached(Facts(), [made, begun, other], [])
    assert name not in reached(Facts(), [made, begun, done, dies], [])


def test_an_election_counts_after_a_clock_has_jumped() -> None:
    moments, name = [record(5, "election", "n1")], "elections after a clock jump"
    assert reached(Facts(), moments, [Told("clock_jump", 4)])[name] == 1
    assert name not in reached(Facts(), moments, [Told("clock_jump", 6)])
    assert name not in reached(Facts(), moments, [Told("kill", 4)])


def test_a_handover_counts_with_writes_under_way() -> None:
    moments, name = [record(50, "handover", "n1")], "handovers with writes under way"
    for kind, ended_ns, count in (
        (Kind.SET, 60, 1), (Kind.SET, None, 1), (Kind.SET, 45, 0), (Kind.GET, 60, 0),
    ):  # fmt: skip
        facts = Facts()
        facts.operations.append(Operation("c1", 1, kind, 0, b"k", invoked_ns=40, ended_ns=ended_ns))
        assert reached(facts, moments, []).get(name, 0) == count


def test_a_purge_counts_with_a_consumer_behind() -> None:
    facts = Facts()
    facts.excuse(10, 0, 7, "purge")
    facts.streamed.append(Streamed(9, "w1", 0, 1, 7))
    assert "purges with a consumer behind" not in reached(facts, [], [])
    facts.streamed.append(Streamed(9, "w2", 0, 1, 6))
    facts.rolled_back.append(RolledBack(11, "w2", 0, 6, 0))
    found = reached(facts, [], [])
    assert found["purges with a consumer behind"] == 1
    assert found["rollbacks of a consumer after a purge"] == 1
    facts.excuses = [Excuse(10, 0, 3, "branch")]
    assert reached(facts, [], [])["rollbacks of a consumer after a branch"] == 1
    assert "rollbacks of a consumer after a purge" not in reached(facts, [], [])


def test_refusals_and_unknown_outcomes_are_told_apart() -> None:
    facts = Facts()
    for number, (kind, outcome) in enumerate(
        ((Kind.SET, Outcome.REFUSED), (Kind.SET, Outcome.AMBIGUOUS), (Kind.SET, Outcome.OK))
    ):
        facts.operations.append(Operation("c1", number, kind, 0, b"k", outcome=outcome))
    assert reached(facts, [], []) == {"operations refused": 1, "writes without an answer": 1}


def test_the_table_names_what_was_never_reached() -> None:
    text = table(Counter({OF_CLUSTERS[0]: 3}))
    assert f"3  {OF_CLUSTERS[0]}" in text
    assert f"never: {', '.join(OF_CLUSTERS[1:])}" in text


class Part:
    """What a NodeWatch reads of a partition."""

    def __init__(self) -> None:
        self.vb_id = 0
        self.state = VbState.REPLICA
        self.leader_epoch = self.vb_uuid = 1
        self.high_seqno = 9
        self.synced_seqno = self.committed_seqno = self.purge_seqno = 0
        self.incomplete_snapshot: SnapshotWindow | None = None


def test_a_node_tells_what_changed_once() -> None:
    told: list[str] = []
    part = Part()
    watch = NodeWatch(lambda kind, _text, _vb_id: told.append(kind), [part])  # type: ignore[list-item]
    watch.look()
    assert told == []
    part.incomplete_snapshot = SnapshotWindow(9, 20, 10)
    watch.look()
    watch.cut_off([0], "ends")
    part.incomplete_snapshot, part.high_seqno = None, 20
    watch.look()
    watch.cut_off([0], "ends")
    part.high_seqno = 5
    watch.look()
    part.high_seqno = 0
    watch.look()
    part.state = VbState.FENCED
    watch.look()
    watch.look()
    watch.windows({"n2-1"})
    watch.windows({"n2-1"})
    assert told == [
        "snapshot begun", "snapshot cut off", "snapshot completed", "rollback of a replica",
        "rollback of a replica to 0", "fence", "window full",
    ]  # fmt: skip
