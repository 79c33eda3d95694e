"""X_GROUP_BEAT: members of a group join, renew their leases, die and leave; epochs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.session.group_command import GroupBeat, GroupRecord, after_beat, owners_after
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState
from vbucket.model.ids import vbucket_of

KEY = b"_dcpd:group:g"
MS = 1_000_000


@pytest.fixture
def node() -> MemoryNode:
    return MemoryNode()


def connected(node: MemoryNode) -> Peer:
    peer = node.connect()
    peer.hello()
    return peer


def beat(node: MemoryNode, member: str, **more: Any) -> Any:
    """Beat, and return epoch and members once that is committed; or the status of a refusal."""
    answer = share(node, member, **more)
    if isinstance(answer, dict):
        del answer["vbuckets"]
    return answer


def share(node: MemoryNode, member: str, **more: Any) -> Any:
    """The same, with the partitions of the member."""
    vb_id = vbucket_of(KEY, node.partitions)
    value = json.dumps({"member": member, "lease_ms": 1000, **more}).encode()
    peer = connected(node)
    answer = peer.ask(Opcode.X_GROUP_BEAT, vb_id=vb_id, key=KEY, value=value)
    node.commit()
    return json.loads(answer.value) if answer.status == Status.OK else answer.status


def test_members_join_die_and_leave(node: MemoryNode) -> None:
    assert beat(node, "a") == {"epoch": 1, "members": ["a"]}
    assert beat(node, "b") == {"epoch": 2, "members": ["a", "b"]}
    node.now_ns += 900 * MS
    assert beat(node, "b") == {"epoch": 2, "members": ["a", "b"]}
    node.now_ns += 200 * MS
    assert beat(node, "b") == {"epoch": 3, "members": ["b"]}, "a has not beaten for its lease"
    assert beat(node, "a") == {"epoch": 4, "members": ["b", "a"]}
    assert beat(node, "b", leaves=True) == {"epoch": 5, "members": ["a"]}


def test_members_keep_their_partitions_as_far_as_possible(node: MemoryNode) -> None:
    alone = share(node, "a")["vbuckets"]
    assert alone == list(range(node.partitions))
    second = share(node, "b")["vbuckets"]
    first = share(node, "a")["vbuckets"]
    assert sorted(first + second) == alone
    third = share(node, "c")["vbuckets"]
    assert set(share(node, "a")["vbuckets"]) < set(first)
    assert set(share(node, "b")["vbuckets"]) < set(second)
    node.crash()
    assert share(node, "c")["vbuckets"] == third
    assert share(node, "c", leaves=True)["vbuckets"] == []
    assert set(share(node, "a")["vbuckets"]) == set(first), "c had it in between"


@given(
    st.lists(st.sampled_from("abcdef"), max_size=40), st.sets(st.sampled_from("abcdefg")),
    st.integers(1, 40),
)  # fmt: skip
def test_shares_are_equal_and_few_change_hands(
    before: list[str], after: set[str], count: int
) -> None:
    members = sorted(after)
    owners = owners_after(before, members, count)
    if not members:
        assert owners == []
        return
    assert len(owners) == count
    sizes = {name: owners.count(name) for name in members}
    assert max(sizes.values()) - min(sizes.values()) <= 1
    kept = sum(now == was for now, was in zip(owners, before, strict=False))
    had = sorted((before[:count].count(name) for name in members), reverse=True)
    least, over = divmod(count, len(members))
    best = sum(min(size, least + (at < over)) for at, size in enumerate(had))
    assert kept == best


def test_an_epoch_survives_crashes_and_leases_begin_anew(node: MemoryNode) -> None:
    beat(node, "a")
    beat(node, "b")
    node.now_ns += 5_000 * MS
    node.crash()
    assert beat(node, "b") == {"epoch": 2, "members": ["a", "b"]}, "nobody knows when a was heard"
    node.now_ns += 1_100 * MS
    assert beat(node, "b") == {"epoch": 3, "members": ["b"]}


def test_an_epoch_is_told_when_it_is_committed(node: MemoryNode) -> None:
    vb_id = vbucket_of(KEY, node.partitions)
    value = json.dumps({"member": "a", "lease_ms": 1000}).encode()
    peer = connected(node)
    peer.ask(Opcode.X_GROUP_BEAT, vb_id=vb_id, key=KEY, value=value)
    assert node.engine.keyspace.has_pending
    node.crash()
    assert beat(node, "b") == {"epoch": 1, "members": ["b"]}


@pytest.mark.parametrize(
    "more", [{"member": ""}, {"lease_ms": 1}, {"lease_ms": 10**9}, {"of": 1}, {"member": 7}]
)
def test_what_is_no_beat_is_refused_and_changes_nothing(node: MemoryNode, more: Any) -> None:
    assert beat(node, **{"member": "a", **more}) == Status.EINVAL
    assert beat(node, "a") == {"epoch": 1, "members": ["a"]}


def test_only_the_master_of_its_partition_coordinates(node: MemoryNode) -> None:
    part = node.engine.partitions[vbucket_of(KEY, node.partitions)]
    part.state = VbState.REPLICA
    assert beat(node, "a") == Status.NOT_MY_VBUCKET
    part.state = VbState.ACTIVE
    peer = connected(node)
    value = json.dumps({"member": "a", "lease_ms": 1000}).encode()
    ask = Opcode.X_GROUP_BEAT
    assert peer.ask(ask, vb_id=part.vb_id ^ 1, key=KEY, value=value).status == Status.EINVAL
    assert peer.ask(ask, vb_id=part.vb_id, key=b"g", value=value).status == Status.EINVAL


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 700), st.booleans()), max_size=40)
)
def test_each_change_of_the_members_begins_an_epoch(acts: list[tuple[str, int, bool]]) -> None:
    """A member that beats within its lease stays; one that does not is out with the next beat."""
    record, leases, now_ns = GroupRecord(0, [], []), dict[str, tuple[int, int]](), 0
    heard: dict[str, int] = {}
    for member, waits_ms, leaves in acts:
        now_ns += waits_ms * MS
        before = record
        record = after_beat(record, leases, GroupBeat(member, 1000, leaves), now_ns, 8)
        heard[member] = now_ns - 1_000 * MS if leaves else now_ns
        assert set(record.members) == {
            name for name, at_ns in heard.items() if now_ns - at_ns < 1_000 * MS
        }
        assert record.epoch - before.epoch == (record.members != before.members)


def test_a_clock_that_is_set_back_keeps_nobody_who_is_dead(node: MemoryNode) -> None:
    beat(node, "a")
    beat(node, "b")
    node.now_ns -= 3_600_000 * MS
    assert beat(node, "b") == {"epoch": 2, "members": ["a", "b"]}
    node.now_ns += 1_100 * MS
    assert beat(node, "b") == {"epoch": 3, "members": ["b"]}


def test_others_stay_when_member_leaves_new_master(node: MemoryNode) -> None:
    """It grants all of them whole leases, also with the beat of one that leaves."""
    beat(node, "a")
    beat(node, "b")
    node.crash()
    assert beat(node, "b", leaves=True) == {"epoch": 3, "members": ["a"]}
