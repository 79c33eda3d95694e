"""A node becomes a member although answers of the metadata store are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from dcp.server.cluster.cluster_file import ClusterToken, ClusterTokenError
from dcp.server.cluster.joining import enrolment
from dcp.server.cluster.joining.enrolment import (
    EnrolmentError,
    NewCluster,
    found_cluster,
    join_cluster,
)
from failover.coordinator.records import ClusterKeys, ClusterRecord, MemberRecord, decode_record
from failover.metadata.metastore import (
    OutcomeUnknown,
    Range,
    RangeResult,
    StoreRequest,
    StoreResult,
    StoreUnavailable,
)
from failover.metadata.revision_store import RevisionStore
from support.memory_node import MemoryNode

ROOT = b"/dcpd/x/"
WANTED = NewCluster(2, None)


class ForgetfulStore:
    """Carries requests out, and loses every second answer, or all."""

    def __init__(self, *, answers: bool = True) -> None:
        self.store = RevisionStore()
        self._answers = answers
        self._calls = 0

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        self._calls += 1
        result = self.store.apply(0, request)
        is_lost = not self._answers or self._calls % 2 == 1
        told = OutcomeUnknown("lost") if is_lost else result
        asyncio.get_running_loop().call_soon(done, told)

    def watch(self, *_: object) -> None:
        raise AssertionError("nobody watches")


def member(number: int, name: str) -> MemberRecord:
    return MemberRecord(member=f"m{number}", address=f"127.0.0.1:{number}", name=name)


async def test_lost_answers_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "AGAIN_S", 0.0)
    store, node = ForgetfulStore(), MemoryNode()
    await found_cluster(store, ROOT, node.engine, member(1, "a"), WANTED, b"{}")
    cluster = await join_cluster(store, ROOT, node.engine, member(2, "b"))
    assert cluster.copies == 2
    found = store.store.apply(0, Range(ROOT, is_prefix=True))
    assert isinstance(found, RangeResult)
    kinds = [item.key.removeprefix(ROOT).partition(b"/")[0] for item in found.items]
    assert kinds.count(b"partition") == node.engine.num_vbuckets
    assert kinds.count(b"member") == kinds.count(b"name") == 2
    with pytest.raises(EnrolmentError, match="another member has the name b"):
        await join_cluster(store, ROOT, node.engine, member(3, "b"))
    assert not store.store.apply(0, Range(ClusterKeys(ROOT).root + b"member/m3")).items


async def test_without_an_answer_it_gives_up_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enrolment, "AGAIN_S", 0.0)
    monkeypatch.setattr(enrolment, "ANSWER_S", 0.05)
    store = ForgetfulStore(answers=False)
    with pytest.raises(EnrolmentError, match="does not answer: lost"):
        await found_cluster(store, ROOT, MemoryNode().engine, member(1, "a"), WANTED, b"{}")


@pytest.mark.usefixtures("at_once")
async def test_a_node_with_another_number_of_partitions() -> None:
    store, node = ForgetfulStore(), MemoryNode(partitions=64)
    await found_cluster(store, ROOT, node.engine, member(1, "a"), WANTED, b"{}")
    found = store.store.apply(0, Range(ClusterKeys(ROOT).cluster))
    assert isinstance(found, RangeResult)
    assert decode_record(found.items[0], ClusterRecord).partitions == 64
    error = await refused(store, member(2, "b"))  # it has 16
    assert error.why == "this node has 16 partitions, and those of the cluster have 64"
    assert "--partitions 64" in error.try_this
    other = MemoryNode(partitions=64)
    assert (await join_cluster(store, ROOT, other.engine, member(2, "b"))).partitions == 64


def test_a_token_is_read_back_and_a_damaged_one_is_refused() -> None:
    token = ClusterToken(cluster="ab", meta="embedded://127.0.0.1:1", secret="s")
    assert ClusterToken.from_text(f" {token.to_text()}\n") == token
    for text in ("", "x", token.to_text()[:-3], token.to_text().replace("dcpd", "dcpc")):
        with pytest.raises(ClusterTokenError, match="no token of a cluster"):
            ClusterToken.from_text(text)


async def refused(store: ForgetfulStore, record: MemberRecord) -> EnrolmentError:
    with pytest.raises(EnrolmentError) as found:
        await join_cluster(store, ROOT, MemoryNode().engine, record)
    assert not store.store.apply(0, Range(ClusterKeys(ROOT).root + b"member/m2")).items
    return found.value


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enrolment, "AGAIN_S", 0.0)


@pytest.mark.usefixtures("at_once")
async def test_name_that_is_taken_is_told_without_key_of_store() -> None:
    store, node = ForgetfulStore(), MemoryNode()
    await found_cluster(store, ROOT, node.engine, member(1, "a"), WANTED, b"{}")
    error = await refused(store, member(2, "a"))
    assert error.why == "another member has the name a"
    assert "--name" in error.try_this
    assert "/dcpd/" not in str(error)
    with pytest.raises(EnrolmentError, match="id of this data folder is there already"):
        await join_cluster(store, ROOT, MemoryNode().engine, member(1, "b"))


@pytest.mark.usefixtures("at_once")
async def test_a_rack_that_only_some_nodes_name_is_refused() -> None:
    store, node = ForgetfulStore(), MemoryNode()
    await found_cluster(store, ROOT, node.engine, member(1, "a"), WANTED, b"{}")
    error = await refused(store, msgspec.structs.replace(member(2, "b"), rack="r1"))
    assert "names rack 'r1', and node a names none" in error.why
    assert error.try_this.startswith("Leave --rack out")

    store = ForgetfulStore()
    racked = msgspec.structs.replace(member(1, "a"), rack="r1")
    await found_cluster(store, ROOT, node.engine, racked, WANTED, b"{}")
    error = await refused(store, member(2, "b"))
    assert "names no rack, and node a names 'r1'" in error.why
    assert error.try_this == "Name its rack with --rack"
    await join_cluster(store, ROOT, node.engine, msgspec.structs.replace(member(2, "b"), rack="r2"))


class DenyingStore(ForgetfulStore):
    """Does not let this node in."""

    def submit(self, request: StoreRequest, done: Callable[[StoreResult], None]) -> None:
        self._calls += 1
        asyncio.get_running_loop().call_soon(done, StoreUnavailable("another secret", True))


async def test_a_store_that_does_not_let_the_node_in_is_asked_once() -> None:
    store = DenyingStore()
    error = await refused(store, member(2, "b"))
    assert error.why == "the metadata store does not let this node in: another secret"
    assert "the token" in error.try_this
    assert store._calls == 1
