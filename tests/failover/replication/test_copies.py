"""Two nodes and the real bytes between them: what a replica holds equals what its master holds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from failover.rules.isr import serves_from_ns
from failover.rules.replication_record import (
    BranchUnderWay,
    add_copy,
    drop_copies,
    elect,
    expand,
    start_branch,
    want,
)
from support.copies import Copies, CopyNode, expiry_of, holdings
from vbucket.engine.engine import SET
from vbucket.engine.partition import VbState
from vbucket.model.entry import META

VB = 1
KEYS = [b"\0one", b"\0two", b"\0three"]


def begin(node: CopyNode) -> None:
    node.now_ns += 1 << 16
    node.engine.begin_batch(node.now_ns)


def put(copies: Copies, key: bytes, value: bytes = b"v", expiry: int = 0, vb_id: int = VB) -> None:
    node = copies.master(vb_id)
    begin(node)
    assert node.engine.store(SET, vb_id, key, key + value, 0, expiry, 0, 0)[0] == 0


def test_a_replica_holds_what_its_master_holds() -> None:
    copies = Copies()
    copies.rest()
    put(copies, b"\0one")
    put(copies, b"\0two", expiry=copies.a.now_ns // 10**9 + 60)
    copies.rest()
    put(copies, b"\0one", b"again")
    copies.rest()
    assert copies.problems == []
    assert len(holdings(copies.a, VB)["entries"]) == 3  # type: ignore[arg-type]
    assert holdings(copies.b, VB) == holdings(copies.a, VB)


def cas_of(entry: bytes) -> int:
    return int(META.unpack_from(entry)[4])


class Play:
    """Random steps of two nodes. A step that is impossible now does nothing."""

    def __init__(self) -> None:
        self.copies = Copies()
        self.copies.rest()

    def master_or_none(self) -> CopyNode | None:
        """Return the master, if it serves."""
        node = self.copies.master(VB)
        part = node.engine.partitions[VB]
        return node if part.state == VbState.ACTIVE and not part.holds else None

    def put(self, key: bytes, number: int) -> None:
        if (node := self.master_or_none()) is not None:
            expiry = node.now_ns // 10**9 + 1000 + number if number % 3 == 0 else 0
            put(self.copies, key, b"%d" % number, expiry)

    def delete(self, key: bytes, number: int) -> None:
        if (node := self.master_or_none()) is not None:
            begin(node)
            node.engine.delete(VB, key, 0)

    def commit(self, key: bytes, number: int) -> None:
        self.copies.nodes["ab"[number % 2]].commit()

    def move(self, key: bytes, number: int) -> None:
        self.copies.move(up=number * 7, down=number * 11)

    def cut(self, key: bytes, number: int) -> None:
        for wire in list(self.copies.wires):
            wire.take()
            wire.deliver(number * 3, number * 5)  # a message may be cut in its middle
            wire.cut()

    def tick(self, key: bytes, number: int) -> None:
        for _ in range(number % 7):
            self.copies.tick()

    def merge(self, key: bytes, number: int) -> None:
        self.copies.nodes["ab"[number % 2]].merge()

    def raise_floor(self, key: bytes, number: int) -> None:
        if (node := self.master_or_none()) is not None:
            part = node.engine.partitions[VB]
            node.engine.keyspace.raise_floor(VB, part.committed_seqno - number % 3, number % 4)

    def elect(self, key: bytes, number: int) -> None:
        copies = self.copies
        member = "ab"[number % 2]
        if member in copies.records[VB].isr:
            copies.write(VB, elect(copies.records[VB], member))

    def branch(self, key: bytes, number: int) -> None:
        record, part = self.copies.records[VB], self.copies.master(VB).engine.partitions[VB]
        at_seqno = max(part.high_seqno - number % 3, part.history_floor)
        if self.master_or_none() is not None and record.branch is None:
            branch = BranchUnderWay(1000 + number, at_seqno)
            self.copies.write(VB, start_branch(record, branch))

    def drop(self, key: bytes, number: int) -> None:
        """Drop the copy of the node that is not the master."""
        record = self.copies.records[VB]
        leaving = [copy for copy in record.copies if copy != record.master]
        if leaving and record.branch is None:
            self.copies.write(VB, drop_copies(record, leaving, in_sync_min=1))

    def add(self, key: bytes = b"", number: int = 0) -> None:
        """Let the other node have a copy again."""
        record = self.copies.records[VB]
        for member in self.copies.nodes.keys() - set(record.copies):
            self.copies.write(VB, expand(add_copy(record, member), member))

    def crash(self, key: bytes, number: int) -> None:
        copies = self.copies
        node = copies.nodes["ab"[number % 2]]
        for wire in copies.wires:
            if node in (wire.node, wire.master):
                wire.cut()
        node.crash(keep_unsynced_bytes=number)
        copies.show(node)
        for vb_id, record in copies.records.items():
            if record.master == node.member:  # another incarnation waits to be elected again
                copies.write(vb_id, elect(record, node.member))


STEPS = ["put"] * 5 + ["delete", "commit", "commit", "commit", "move", "move", "move", "move"]
STEPS += ["cut", "tick", "tick", "merge", "raise_floor", "elect", "branch", "crash"]
STEPS += ["drop", "add"]
steps = st.tuples(st.sampled_from(STEPS), st.sampled_from(KEYS), st.integers(0, 40))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(steps, max_size=40))
def test_whatever_happens_copies_are_equal_at_rest(story: list[tuple[str, bytes, int]]) -> None:
    play = Play()
    for name, key, number in story:
        getattr(play, name)(key, number)
    copies = play.copies
    play.add()
    copies.rest()
    assert copies.problems == [], "no side broke the rules"
    one, two = (holdings(node, VB) for node in copies.nodes.values())
    for held in (one, two):
        newest_cas = max((cas_of(entry) for entry in held["entries"]), default=0)
        assert held.pop("cas") >= newest_cas  # what was rolled back may have raised it
    assert two == one
    documents = {
        key: copies.a.engine.document_entry(copies.a.engine.partitions[VB], key) for key in KEYS
    }
    wanted = {(expiry_of(entry), key) for key, entry in documents.items() if entry is not None}
    assert one["due"] == {(expiry, key) for expiry, key in wanted if expiry}
    for node in copies.nodes.values():
        part = node.engine.partitions[VB]
        assert part.state == (VbState.ACTIVE if node is copies.master(VB) else VbState.REPLICA)
        entries = [node.engine.document_entry(part, key) for key in KEYS]
        assert part.item_count == sum(entry is not None for entry in entries)


@pytest.mark.parametrize("has_dialled_again", [False, True])
def test_promoted_replica_without_link_waits_for_confirmation(
    has_dialled_again: bool,
) -> None:
    copies = Copies()
    copies.rest()
    for _ in range(20):
        copies.tick()
        copies.move()
    confirmed_ns = copies.now_ns
    for wire in copies.wires:
        wire.cut()
    if has_dialled_again:  # another record changes, and its partition asks for a new link
        copies.write(0, want(copies.records[0], "b"))
    copies.write(VB, elect(copies.records[VB], "b", gone="a"))
    part = copies.b.engine.partitions[VB]
    copies.until(lambda: part.state == VbState.ACTIVE)
    assert copies.now_ns >= serves_from_ns(confirmed_ns, was_handed_over=False)


def test_link_that_breaks_rules_is_closed_and_new_one_goes_on() -> None:
    """Nothing of the damaged message is applied, and nothing is lost by it."""
    copies = Copies()
    copies.rest()
    [wire] = copies.wires
    put(copies, KEYS[0])
    copies.a.commit()
    wire.take()
    wire.to_replica = wire.to_replica[:-1] + bytes([wire.to_replica[-1] ^ 1])
    copies.move()
    [problem] = copies.problems
    assert "the checksum of its" in problem
    assert copies.b.engine.partitions[VB].high_seqno == 0
    copies.rest()
    assert holdings(copies.b, VB) == holdings(copies.a, VB)
    assert len(copies.problems) == 1
