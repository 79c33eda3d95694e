"""The start and the stop of a member's process: who it fits to, and who takes over from it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dcp.server.cluster import replicated_node
from dcp.server.cluster.joining.enrolment import ask
from dcp.server.observe.event_log import MembershipOverError
from failover.coordinator.records import AliveRecord, ClusterKeys, KeyKind, encode_record
from failover.metadata.metastore import Put, Txn, TxnResult
from failover.replication.messages import FORMAT
from support.cluster_here import CLUSTER, ClusterHere
from support.waiting import until_so

KEYS = ClusterKeys(f"/dcpd/{CLUSTER}/".encode())


async def test_member_of_an_incompatible_version_ends_at_its_start(
    tmp_path: Path,
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        n1 = await cluster.become_member("n1", copies=1)
        await n1.stop()
        other = AliveRecord(
            member="m2", incarnation=1, name="n2", protocol=FORMAT + 1, oldest_protocol=FORMAT + 1
        )
        put = Put(KEYS.of_member(KeyKind.ALIVE, "m2"), encode_record(other))
        assert isinstance(await ask(cluster.meta.client(), Txn((), (put,))), TxnResult)
        n1 = await cluster.start("n1")
        why = rf"node n2 speaks version {FORMAT + 1} .* speaks version {FORMAT}\. .* stop all of"
        with pytest.raises(MembershipOverError, match=why):
            async with asyncio.timeout(30):
                await n1.run_until_stopped()
        assert not cluster.active("n1")
        assert n1.replicated is not None
        assert not n1.replicated.session.membership.has_registered


async def test_a_stop_does_not_wait_for_a_successor_that_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease goes on, but it takes over nothing, and takes nobody out of an in-sync set."""
    monkeypatch.setattr(replicated_node, "LEAVE_S", 1.0)
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        n1 = await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        n2 = await cluster.become_member("n2")
        await until_so(lambda: 2 in cluster.in_sync("n1"))
        assert n1.replicated is not None
        assert n2.replicated is not None
        for step in ("records_changed", "tick", "step", "outcome"):
            monkeypatch.setattr(n2.replicated.core, step, lambda *_: None)
        async with asyncio.timeout(30):
            await n1.replicated.leave()
        assert n1.replicated._in_sync_count(), "the time was over before that"
        assert n1.replicated.session.view.stays(n2.replicated.member), "n2 lives"


async def test_a_stop_goes_on_while_partitions_are_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than LEAVE_S, which is for the next one of them."""
    monkeypatch.setattr(replicated_node, "LEAVE_S", 0.2)
    left = list(range(20))
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        n1 = await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await until_so(lambda: 2 in cluster.in_sync("n1"))
        assert n1.replicated is not None
        far_ns = 1 << 62
        await n1.replicated._until_none(far_ns, lambda: len(left) and (left.pop() or len(left)))
    assert not left
