"""One member, one address, one process: a second one is refused while the first lives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from failover.coordinator.cluster_session import ClusterSession, StoreDriver
from failover.coordinator.effects import Answered, Notice, Submit, Tick
from failover.coordinator.membership import (
    BLOCKED_LEASES,
    LEASE_TTL_S,
    Membership,
    MembershipState,
    ProcessFacts,
)
from failover.coordinator.partition_choices import CoordinatorSettings
from failover.coordinator.records import AliveRecord, ClusterKeys, KeyKind, decode_record
from failover.metadata.metastore import (
    LeaseResult,
    OutcomeUnknown,
    Range,
    RangeResult,
    Txn,
    TxnResult,
)
from failover.metadata.revision_store import RevisionStore
from memory.meta_store import MemoryMetaStore

ROOT = b"/dcpd/x/"
KEYS = ClusterKeys(ROOT)
MS = 1_000_000
TICK_NS = 50 * MS
FOLDER = ProcessFacts("boot/1/7", "n1", 1, 1, ("127.0.0.1:11210", "127.0.0.1:8091"))
COPY = FOLDER._replace(place="boot/1/8", addresses=("127.0.0.1:11220", "127.0.0.1:8101"))


class LossyStore(MemoryMetaStore):
    """Loses the next answers to transactions."""

    lost = 0

    def submit(self, request: Any, done: Any) -> None:
        if isinstance(request, Txn) and self.lost:
            self.lost -= 1
            super().submit(request, lambda _result: done(OutcomeUnknown("lost")))
        else:
            super().submit(request, done)


class Cluster:
    """Processes on one store, and their time."""

    def __init__(self) -> None:
        self.store = RevisionStore()
        self.now_ns = 0
        self.processes: list[Process] = []

    def start(self, facts: ProcessFacts, incarnation: int, member: str = "m1") -> Process:
        process = Process(self, facts, incarnation, member)
        self.processes.append(process)
        return process

    def run(self, seconds: float) -> None:
        until_ns = self.now_ns + round(seconds * 1e9)
        while self.now_ns < until_ns:
            self.now_ns += TICK_NS
            for process in self.processes:
                if process.runs:
                    process.driver.tick()
                    process.client.advance(self.now_ns)

    def alive(self, member: str = "m1") -> AliveRecord | None:
        found = self.store.apply(self.now_ns, Range(KEYS.of_member(KeyKind.ALIVE, member)))
        assert isinstance(found, RangeResult)
        return decode_record(found.items[0], AliveRecord) if found.items else None


class Process:
    def __init__(
        self, cluster: Cluster, facts: ProcessFacts, incarnation: int, member: str
    ) -> None:
        self.cluster = cluster
        session = ClusterSession(ROOT, member, incarnation, CoordinatorSettings())
        session.membership.introduce(facts)
        self.membership: Membership = session.membership
        self.session = session
        self.notices: list[str] = []
        self.client = LossyStore(cluster.store)
        self.driver = StoreDriver(session, self.client, self)
        self.runs = True

    def now_ns(self) -> int:
        return self.cluster.now_ns

    def guarded(self, step: Callable[[], None]) -> None:
        step()

    def take(self, effect: object) -> None:
        if isinstance(effect, Notice):
            self.notices.append(effect.text)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_process_of_the_same_folder_takes_over_at_once(cluster: Cluster) -> None:
    first = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    assert first.membership.is_alive
    first.runs = False  # SIGKILL
    second = cluster.start(FOLDER, 2)
    cluster.run(0.2)
    assert second.membership.is_alive
    cluster.run(2 * LEASE_TTL_S)
    assert second.membership.is_alive, "the end of the first one's lease removes nothing of it"


def test_a_copy_of_the_folder_is_refused_while_the_first_lives(cluster: Cluster) -> None:
    first = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    copy = cluster.start(COPY, 2)
    cluster.run(BLOCKED_LEASES * LEASE_TTL_S - 1)
    assert not copy.membership.has_registered
    assert copy.membership.state is MembershipState.ANNOUNCING or not copy.membership.lease_id
    cluster.run(2)
    assert copy.membership.state is MembershipState.REFUSED
    assert "another process runs as node n1 at 127.0.0.1:11210" in copy.membership.why_over
    assert "with a copy of this data folder" in copy.membership.why_over
    assert "Stop one of the two" in copy.membership.why_over
    assert first.membership.is_alive, "it was not disturbed"
    assert not any("lease" in text for text in first.notices)
    record = cluster.alive()
    assert record is not None
    assert record.incarnation == 1


def test_a_copy_takes_over_when_the_lease_of_the_first_is_over(cluster: Cluster) -> None:
    first = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    first.runs = False
    moved = cluster.start(COPY, 2)  # for example the folder on another machine
    cluster.run(LEASE_TTL_S - 1)
    assert not moved.membership.has_registered
    cluster.run(1.5)
    assert moved.membership.is_alive
    # The first one was only frozen: it is told, and ends.
    first.runs = True
    cluster.run(1)
    assert first.membership.state is MembershipState.REPLACED
    assert "a newer process at 127.0.0.1:11220 is member m1" in first.membership.why_over
    assert moved.membership.is_alive


def test_without_a_place_nobody_is_taken_for_the_same_folder(cluster: Cluster) -> None:
    first = cluster.start(FOLDER._replace(place=""), 1)
    cluster.run(0.2)
    second = cluster.start(COPY._replace(place=""), 2)
    cluster.run(1)
    assert first.membership.is_alive
    assert not second.membership.has_registered


@pytest.mark.parametrize("number", [0, 1])
def test_an_address_of_a_node_that_lives_is_refused(cluster: Cluster, number: int) -> None:
    first = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    addresses = ["127.0.0.1:11220", "127.0.0.1:8101"]
    addresses[number] = FOLDER.addresses[number]
    other = ProcessFacts("boot/1/9", "n2", 1, 1, tuple(addresses))
    second = cluster.start(other, 1, "m2")
    cluster.run(BLOCKED_LEASES * LEASE_TTL_S + 1)
    assert second.membership.state is MembershipState.REFUSED
    assert f"node n1 of this cluster has the address {addresses[number]}" in (
        second.membership.why_over
    )
    assert "--advertise-host" in second.membership.why_over
    assert cluster.alive("m2") is None, "nothing of it is there"
    assert first.membership.is_alive


def test_address_of_dead_node_is_free_when_its_lease_is_over(cluster: Cluster) -> None:
    first = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    first.runs = False
    second = cluster.start(FOLDER._replace(place="boot/1/9", name="n2"), 1, "m2")
    cluster.run(LEASE_TTL_S + 0.5)
    assert second.membership.is_alive


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_lost_answers_do_not_block_a_process_by_itself(cluster: Cluster, lost: int) -> None:
    process = cluster.start(FOLDER, 1)
    process.client.lost = lost
    cluster.run(1)
    assert process.membership.is_alive
    assert not any("Waiting" in text for text in process.notices)


def test_a_process_that_is_about_to_stop_says_so(cluster: Cluster) -> None:
    process = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    process.session.begin_to_leave(cluster.now_ns)
    cluster.run(0.2)
    record = cluster.alive()
    assert record is not None
    assert record.is_leaving
    assert process.membership.is_alive
    process.driver.carry_out(process.session.leave())
    cluster.run(0.1)
    assert cluster.alive() is None


def test_a_lease_that_was_lost_is_replaced_by_another_one(cluster: Cluster) -> None:
    process = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    lease_id = process.membership.lease_id
    process.runs = False  # SIGSTOP
    cluster.now_ns += (LEASE_TTL_S + 1) * 1_000_000_000
    process.runs = True
    cluster.run(1)
    assert process.membership.is_alive
    assert process.membership.lease_id != lease_id


def test_process_that_did_not_run_asks_what_became_of_its_lease(cluster: Cluster) -> None:
    process = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    process.runs = False
    cluster.run(LEASE_TTL_S - 0.5)
    cluster.now_ns += 5 * LEASE_TTL_S * 1_000 * MS  # nobody runs, and the store neither
    lease_id = process.membership.lease_id
    process.driver.tick()
    assert process.membership.lease_id == lease_id, "answers may have come meanwhile"
    cluster.now_ns += TICK_NS
    process.driver.tick()
    assert process.membership.lease_id == lease_id, "it asks first"
    process.client.advance(cluster.now_ns)
    process.runs = True
    cluster.run(0.5)
    assert process.membership.is_alive, "the lease was over, so it has another one"
    assert process.membership.lease_id != lease_id
    assert any("is over" in notice for notice in process.notices)


def test_lease_lapses_while_its_process_runs_and_gets_no_answer(cluster: Cluster) -> None:
    process = cluster.start(FOLDER, 1)
    cluster.run(0.2)
    for _ in range(round(LEASE_TTL_S * 1_000 * MS / TICK_NS) + 1):
        cluster.now_ns += TICK_NS
        process.driver.tick()  # the store answers nothing
    assert not process.membership.lease_id
    assert any("not renewed in time" in notice for notice in process.notices)


def test_a_late_answer_to_a_keep_alive_counts() -> None:
    membership = Membership(KEYS, "m1", 1)
    (grant,) = membership.on_event(0, Tick())
    (announce,) = membership.on_event(0, Answered(grant.tag, LeaseResult(7, LEASE_TTL_S)))
    membership.on_event(0, Answered(announce.tag, TxnResult(5, succeeded=True)))
    assert membership.is_alive
    asked: list[Submit] = []
    for now_ns in range(0, 2_900 * MS, TICK_NS):
        asked += [each for each in membership.on_event(now_ns, Tick()) if isinstance(each, Submit)]
    assert len(asked) == 2
    assert membership.renewals.late == 0
    membership.on_event(2_900 * MS, Answered(asked[0].tag, LeaseResult(7, LEASE_TTL_S)))
    for now_ns in range(2_900 * MS, 3_900 * MS, TICK_NS):
        membership.on_event(now_ns, Tick())
    assert membership.lease_id == 7, "it was renewed at 1 s"
    assert membership.renewals.late == 1
    for now_ns in range(3_900 * MS, 4_100 * MS, TICK_NS):
        membership.on_event(now_ns, Tick())
    assert not membership.lease_id
    assert membership.renewals.late == 2, "and then not at all"


def test_report_comes_after_alive_key_and_a_look_at_the_store(
    cluster: Cluster,
) -> None:
    """Else a report without partitions would say that a member knows nothing better than a store
    that it has not read.
    """
    process = cluster.start(FOLDER, 1)
    session = process.session

    def revision(kind: KeyKind) -> int:
        return session.view.mod_revision(KEYS.of_member(kind, "m1"))

    cluster.run(1)
    assert session.has_read
    assert not revision(KeyKind.SUSPECT), "the node has not looked at the records"
    process.driver.carry_out(session.report(cluster.now_ns, ()))
    cluster.run(0.5)
    assert revision(KeyKind.SUSPECT) > revision(KeyKind.ALIVE)

    process.client.era += 1
    cluster.run(1)
    assert session.has_read
    assert revision(KeyKind.ALIVE) > revision(KeyKind.SUSPECT), "over the new connection"
    process.driver.carry_out(session.report(cluster.now_ns, ()))
    cluster.run(0.5)
    assert revision(KeyKind.SUSPECT) > revision(KeyKind.ALIVE)

    session.begin_to_leave(cluster.now_ns)
    cluster.run(0.5)
    assert session.view.alive["m1"].content.is_leaving
    assert revision(KeyKind.SUSPECT) > revision(KeyKind.ALIVE), "it is the same connection"
