"""Three nodes, several partitions and random steps: whatever anybody takes for committed is on the
disk of every member in sync, and copies are equal at rest.
"""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from failover.rules.replication_record import elect, shrink
from support.copies import Copies, CopyNode, holdings
from vbucket.engine.engine import SET
from vbucket.engine.partition import VbState

PARTITIONS = 4
WINDOWS = [300, 1_000, 2_000, 1 << 20]
"""Bytes on their way: hardly anything fits, one or two groups do, all do."""


class Play:
    """A step that is impossible now does nothing."""

    def __init__(self, window_bytes: int) -> None:
        self.copies = Copies("abc", PARTITIONS)
        for node in self.copies.nodes.values():
            leading = node.core.master
            leading._settings = leading._settings._replace(window_bytes=window_bytes)
        self.copies.rest()
        self.copies.revive()

    def put(self, vb_id: int, number: int) -> None:
        node = self.copies.master(vb_id)
        part = node.engine.partitions[vb_id]
        if part.state == VbState.ACTIVE and not part.holds:
            node.now_ns += 1 << 16
            node.engine.begin_batch(node.now_ns)
            key = b"\0%d" % (number % 3)
            node.engine.store(SET, vb_id, key, key + b"%d" % number, 0, 0, 0, 0)

    def commit(self, vb_id: int, number: int) -> None:
        self._node(number).commit()

    def begin(self, vb_id: int, number: int) -> None:
        """A group is on its way to the disk."""
        self._node(number).begin()

    def put_and_begin(self, vb_id: int, number: int) -> None:
        self.put(vb_id, number)
        self.copies.master(vb_id).begin()

    def put_and_commit(self, vb_id: int, number: int) -> None:
        self.put(vb_id, number)
        self.copies.master(vb_id).commit()

    def move(self, vb_id: int, number: int) -> None:
        self.copies.move()

    def move_some(self, vb_id: int, number: int) -> None:
        self.copies.move(up=number * 7, down=number * 11)

    def cut(self, vb_id: int, number: int) -> None:
        for wire in self.copies.wires[number % 3 :: 3]:
            wire.take()
            wire.deliver(number * 3, number * 5)
            wire.cut()

    def tick(self, vb_id: int, number: int) -> None:
        for _ in range(number % 7):
            self.copies.tick()

    def follow_anew(self, vb_id: int, number: int) -> None:
        """A replica leaves a partition and asks for it again."""
        node, record = self._node(number), self.copies.records[vb_id]
        if record.master != node.member:
            node.core.replica.leave(vb_id)
            node.core.replica.follow(vb_id, record, self.copies.now_ns)

    def leave_isr(self, vb_id: int, number: int) -> None:
        record, member = self.copies.records[vb_id], "abc"[number % 3]
        if member != record.master and len(record.isr) > 1 and member in record.isr:
            self.copies.write(vb_id, shrink(record, [member]))

    def elect(self, vb_id: int, number: int) -> None:
        """Another member in sync becomes master, so that nodes are both master and replica."""
        record, member = self.copies.records[vb_id], "abc"[number % 3]
        if member in record.isr:
            self.copies.write(vb_id, elect(record, member))

    def floor(self, vb_id: int, number: int) -> None:
        node = self.copies.master(vb_id)
        part = node.engine.partitions[vb_id]
        if part.state == VbState.ACTIVE:
            node.engine.keyspace.raise_floor(vb_id, part.committed_seqno, number % 3)

    def _node(self, number: int) -> CopyNode:
        return self.copies.nodes["abc"[number % 3]]

    def check(self) -> None:
        """Check every partition."""
        nodes = self.copies.nodes
        for vb_id in range(PARTITIONS):
            committed = max(
                (held(node, vb_id, node.engine.partitions[vb_id].committed_seqno)
                 for node in nodes.values()),
                key=len,
            )  # fmt: skip
            for member in self.copies.records[vb_id].isr:
                part = nodes[member].engine.partitions[vb_id]
                assert part.synced_seqno >= len(committed), (vb_id, member)
                assert held(nodes[member], vb_id, len(committed)) == committed


def held(node: CopyNode, vb_id: int, seqno: int) -> list[bytes]:
    """Return what a node has of a partition up to a seqno."""
    return node.engine.partitions[vb_id].active.entries[:seqno]


STEPS = ["put"] * 6 + ["put_and_commit"] * 4 + ["commit"] * 5 + ["move"] * 4 + ["move_some"] * 2
STEPS += ["cut", "tick", "tick", "follow_anew", "follow_anew", "leave_isr", "elect"]
STEPS += ["floor", "begin", "begin"] + ["put_and_begin"] * 4
steps = st.tuples(st.sampled_from(STEPS), st.integers(0, PARTITIONS - 1), st.integers(0, 40))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, max_size=60), st.sampled_from(WINDOWS))
def test_what_is_committed_is_on_the_disk_of_all_members_in_sync(
    story: list[tuple[str, int, int]], window_bytes: int
) -> None:
    play = Play(window_bytes)
    for name, vb_id, number in story:
        getattr(play, name)(vb_id, number)
        play.check()
    copies = play.copies
    copies.rest()
    play.check()
    assert copies.problems == [], "no side broke the rules"
    for vb_id in range(PARTITIONS):
        one, two, three = (holdings(node, vb_id) for node in copies.nodes.values())
        for each in (one, two, three):
            del each["cas"]  # what was rolled back may have raised it
        assert one == two == three
