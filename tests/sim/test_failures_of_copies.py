"""Failures of docs/replication.md that change what a copy is: lost folders, unclean elections,
branches, peers that lie.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dcp.stream.snapshots import Message
from dcp.wire.frame import FrameDecoder
from dcp.wire.opcode import Opcode
from failover.replication.messages import pack_entries, unpack_entries
from sim.facts import Outcome
from sim.network import Side
from sim.node import SingleNode
from sim.scenario import Scenario
from sim.serving import ServedConnection
from vbucket.model.entry import value_of


@pytest.fixture
def cluster() -> Scenario:
    return Scenario()


def test_a_lost_folder_comes_back_as_a_new_member_that_is_filled(cluster: Scenario) -> None:
    died_ns, machine = cluster.now_ns, cluster.machine(cluster.master())
    assert cluster.cluster.may_lose_folder(machine.name)
    machine.kill()
    machine.lose_folder()
    machine.start()
    assert f"{machine.name}-2" not in cluster.record().isr, "an empty disk is in no in-sync set"
    assert cluster.first_answer_s(died_ns) < 4
    cluster.until(lambda: f"{machine.name}-2" in cluster.record().isr)
    cluster.passes()


def leave_only_a_copy_out_of_sync(cluster: Scenario) -> tuple[str, str]:
    """Let a copy fall behind, and then all others die; return it and the last master."""
    behind = cluster.replicas()[0]
    cluster.machine(behind).kill()
    cluster.until(lambda: behind not in cluster.in_sync())
    for _ in range(5):
        assert cluster.write().outcome is Outcome.OK
    master = cluster.master()
    for machine in cluster.machines:
        if machine.name != behind:
            machine.kill()
    cluster.machine(behind).start()
    return behind, master


def test_without_anybody_in_sync_partition_waits_for_in_sync_set(cluster: Scenario) -> None:
    behind, _ = leave_only_a_copy_out_of_sync(cluster)
    cluster.run_for(8)
    assert not cluster.node(behind).serves(0)
    for machine in cluster.machines:
        if machine.node is None:
            machine.start()
    cluster.until(cluster.is_served)
    assert cluster.facts.excuses == []
    cluster.passes()


def test_unclean_election_keeps_what_the_dead_had_in_files() -> None:
    cluster = Scenario(min_in_sync=1)
    behind, master = leave_only_a_copy_out_of_sync(cluster)
    cluster.until(lambda: f"{behind}-1" in cluster.node(behind).session.view.alive)
    began_ns = cluster.now_ns
    cluster.cluster.elect_unclean(0)
    assert cluster.first_answer_s(began_ns) < 12
    assert cluster.record().unclean_epoch == cluster.record().epoch
    cluster.machine(master).start()
    cluster.until(lambda: bool(cluster.facts.cut_off))
    cut = cluster.facts.cut_off[0].cut
    assert cut.vb_id == 0
    assert len(cut.entries) >= 5
    cluster.passes()


@pytest.mark.parametrize("after_ms", [0, 1, 3, 6, 12, 50])
@pytest.mark.parametrize("who", ["master", "replica"])
def test_a_branch_interrupted_is_done_everywhere_or_nowhere(who: str, after_ms: int) -> None:
    cluster = Scenario(seed=after_ms + 3)
    master = cluster.master()
    assert cluster.node(master).branch(0, 0.5)
    cluster.run_for(after_ms / 1000)
    victim = cluster.machine(master if who == "master" else cluster.replicas()[0])
    died_ns = cluster.now_ns
    victim.kill()
    cluster.run_for(0.5)
    victim.start()
    assert cluster.first_answer_s(died_ns) < 6
    cluster.until(lambda: cluster.record().branch is None)
    cluster.passes()


def test_with_acknowledge_master_a_lost_answer_is_in_a_file() -> None:
    """An answer says that one disk has it. A durability frame makes it wait for the others."""
    cluster = Scenario(acknowledge="master", durability_share=0.0)
    master = cluster.master()
    node, machine = cluster.node(master), cluster.machine(master)

    def accept(side: Side) -> None:
        state = ServedConnection(node, side).state
        state.shared = state.shared._replace(acknowledges_as_master=True)

    cluster.network.listeners[master] = accept
    cluster.break_links(cluster.clients[0].name, master)
    cluster.run_for(0.1)
    assert cluster.write().outcome is Outcome.OK
    for replica in cluster.replicas():
        cluster.cut(master, replica)
    answered = cluster.write()
    assert answered.outcome is Outcome.OK
    framed = cluster.begin_write(level=1)
    cluster.run_for(0.05)
    assert framed.outcome is None
    machine.cut_power(0.0)
    cluster.mend()
    died_ns = cluster.now_ns
    assert cluster.first_answer_s(died_ns) < 4
    machine.start()
    cluster.until(lambda: bool(cluster.facts.cut_off))
    lost = [value_of(entry) for fact in cluster.facts.cut_off for entry in fact.cut.entries]
    assert answered.argument in lost
    assert framed.outcome is Outcome.AMBIGUOUS


# -- peers that lie --------------------------------------------------------------------------------


def wrong_checksum(message: bytes) -> bytes:
    return message[:-1] + bytes([message[-1] ^ 1])


def gap(message: bytes) -> bytes:
    told = unpack_entries(FrameDecoder().feed(message)[0])
    return pack_entries(told.number + 1, told.question, told.sections)


def wrong_epoch(message: bytes) -> bytes:
    told = unpack_entries(FrameDecoder().feed(message)[0])
    sections = [section._replace(epoch=section.epoch + 1) for section in told.sections]
    return pack_entries(told.number, told.question, sections)


def missing_entry(message: bytes) -> bytes:
    told = unpack_entries(FrameDecoder().feed(message)[0])
    sections = [section._replace(entries=section.entries[1:] * 2) for section in told.sections]
    return pack_entries(told.number, told.question, sections)


LIES: dict[Callable[[bytes], bytes], str] = {
    wrong_checksum: "checksum",
    gap: "follows message",
    wrong_epoch: "epoch",
    missing_entry: "seqno",
}


class LyingConnection(ServedConnection):
    """It changes messages for replicas that bring several entries of partition 0."""

    def __init__(self, node: SingleNode, side: Side, lie: Callable[[bytes], bytes]) -> None:
        super().__init__(node, side)
        self._lie = lie

    def _send(self, messages: list[Message]) -> None:
        super()._send([self._changed(bytes(message)) for message in messages])

    def _changed(self, message: bytes) -> bytes:
        if message[1] != Opcode.X_REPLICA_ENTRIES:
            return message
        told = unpack_entries(FrameDecoder().feed(message)[0])
        brings = any(section.vb_id == 0 and len(section.entries) > 1 for section in told.sections)
        return self._lie(message) if brings else message


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_lying_peer_is_disconnected_and_nothing_of_it_applied(
    lie: Callable[[bytes], bytes],
) -> None:
    cluster = Scenario(2)  # in it the replica gets several changes of partition 0 in one message
    master, replica = cluster.master(), cluster.replicas()[0]
    node, machine = cluster.node(master), cluster.machine(replica)
    machine.kill()
    for _ in range(4):
        cluster.write()
    cluster.network.listeners[master] = lambda side: _lying(node, side, lie)
    machine.start()
    problems: set[str] = set()

    def is_refused() -> bool:
        link = cluster.node(replica).core.replica.links.get(f"{master}-1")
        problems.add("" if link is None else link.problem)
        return any(LIES[lie] in problem for problem in problems)

    cluster.until(is_refused)
    held = cluster.node(replica).engine.partitions[0].high_seqno
    assert held < node.engine.partitions[0].high_seqno
    cluster.network.listeners[master] = node._accept
    cluster.break_links(master, replica)
    cluster.until(lambda: replica in cluster.in_sync())
    cluster.passes()


def _lying(node: SingleNode, side: Side, lie: Callable[[bytes], bytes]) -> None:
    LyingConnection(node, side, lie)
