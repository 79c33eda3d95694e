"""Rollback on demand on partitions with copies: branches, purges, failovers that lose changes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from clients import CheckpointFile, Consumer, Rollback
from dcp.server.cluster.cluster_file import ClusterRefusedError
from dcp.server.node import Node
from dcp.server.operate import replicated_branches
from dcp.server.operate.cluster_requests import MasterFailoverRequest
from dcp.server.operate.replicated_branches import BranchUnknownError
from support import raw_client
from support.cluster_here import PARTITIONS, ClusterHere
from support.raw_client import Answer
from support.server import ctl
from support.waiting import until_so
from vbucket.engine.partition import BranchRefusedError, Partition

VB = 16
"""The partition of the key "hello"."""


async def of_two(cluster: ClusterHere) -> None:
    for name in ("n1", "n2"):
        await cluster.start(name)
        await cluster.become_member(name, copies=2 if name == "n1" else 0)
    await cluster.until_all_in_sync(2)


def nodes(cluster: ClusterHere, vb_id: int = VB) -> tuple[Node, Node]:
    """Return the master of a partition, and the other node."""
    name, other = ("n1", "n2") if vb_id in cluster.active("n1") else ("n2", "n1")
    return cluster.nodes[name], cluster.nodes[other]


def part_of(node: Node, vb_id: int = VB) -> Partition:
    return node.engine.partitions[vb_id]


def uuids(node: Node, vb_id: int = VB) -> list[int]:
    return [vb_uuid for vb_uuid, _ in part_of(node, vb_id).failover.pairs()]


async def ask(node: Node, path: str, body: object) -> Answer:
    """Send a request to a node's admin port."""
    return await raw_client.ask(
        node.ports.admin, "POST", f"/api/v1/vbuckets/{path}", raw_client.login(),
        "content-type: application/json", body=json.dumps(body).encode(),
    )  # fmt: skip


async def rollbacks(node: Node, checkpoint: Path) -> list[int]:
    """Read what is new since the checkpoint; return how far partition VB was sent back."""
    found = []
    store = CheckpointFile(checkpoint)
    address = f"127.0.0.1:{node.ports.kv}"
    async with Consumer(address, store=store, until_now=True, on_rollback="restart") as consumer:
        async for change in consumer.changes():
            if isinstance(change, Rollback):
                assert change.vb_id == VB
                found.append(change.server_seqno)
        await consumer.save()
    return found


async def test_copies_are_branched_purged_and_lose_changes(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path, test_mode="on") as cluster:
        await of_two(cluster)
        master, other = nodes(cluster)
        assert len(uuids(master)) == 1, "a new partition has one version, that of its master"
        assert uuids(master) == uuids(other)
        async with cluster.client("n1") as kv:
            for number in range(6):
                await kv.set(b"hello", b"%d" % number)
            assert await rollbacks(other, tmp_path / "ckpt") == []

            # Whichever node is asked: the other one says where.
            sent_on = await ask(other, f"{VB}/branch", {"at": 4})
            path = f"/api/v1/vbuckets/{VB}/branch"
            assert sent_on.status == 307
            assert sent_on.headers["location"] == f"http://127.0.0.1:{master.ports.admin}{path}"
            assert part_of(master).high_seqno == 6
            ran = await ctl(other.ports.kv, "vb", "state", "dead", "--vb", str(VB))
            assert ran.code == 4, "dcpctl asks the first node, and follows it to the master"
            assert "has copies on other nodes" in ran.err
            branched = await ask(master, f"{VB}/branch", {"at": 4})
            assert branched.status == 200, branched
            assert (branched.body["undone_seqnos"], branched.body["undone_keys"]) == (2, 1)
            for node in (master, other):
                assert part_of(node).high_seqno == 4
                assert str(uuids(node)[0]) == branched.body["vb_uuid"]
            assert (await kv.get(b"hello")).value == b"3"
            assert await rollbacks(other, tmp_path / "ckpt") == [4]

            await kv.delete(b"hello")
            await kv.set(b"hello", b"again")
            purged = await ask(master, f"{VB}/purge", {"upto": 5})
            assert purged.body["purge_seqno"] == 5
            await until_so(lambda: part_of(other).purge_seqno == 5)
            await kv.set(b"hello", b"newest")

        # A failover that loses the newest change: on all copies, with a receipt and a new master.
        changes = master._cluster_operations().changes
        with pytest.raises(ClusterRefusedError, match="its history floor is 6"):
            await changes.failover(MasterFailoverRequest(vb=VB, lose=2, dry_run=True))
        asked = await changes.failover(MasterFailoverRequest(vb=VB, lose=1, dry_run=True))
        assert asked.notes[0] == f"changes 7 to 7 of partition {VB} are lost on all copies"
        assert part_of(master).high_seqno == 7, "it was only asked"
        await changes.failover(MasterFailoverRequest(vb=VB, lose=1))
        await until_so(lambda: nodes(cluster)[0] is other)
        assert part_of(master).high_seqno == part_of(other).high_seqno == 6
        (receipt,) = (await master._cluster_operations().receipts()).receipts
        assert (receipt.vb, receipt.known_lost, receipt.end_seqno) == (VB, 1, "6")


async def test_many_partitions_branch_together(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await of_two(cluster)
        async with cluster.client("n1") as kv:
            for turn in range(2):
                await kv.set_many({b"k%d" % number: b"%d" % turn for number in range(3000)})
            before = {name: cluster.active(name) for name in cluster.nodes}
            high = {
                vb_id: part_of(cluster.nodes[name], vb_id).high_seqno
                for name, vb_ids in before.items()
                for vb_id in vb_ids
            }
            every = list(range(PARTITIONS))
            n1, n2 = cluster.nodes["n1"], cluster.nodes["n2"]
            answers = await asyncio.gather(
                *(ask(node, "branch", {"vbs": every, "fraction": 0.5}) for node in (n1, n2))
            )
        for node, answer in zip((n1, n2), answers, strict=True):
            name = "n1" if node is n1 else "n2"
            assert {each["vb"] for each in answer.body["branched"]} == before[name]
            assert {each["vb"] for each in answer.body["refused"]} == set(every) - before[name]
            assert "ask its master" in answer.body["refused"][0]["why"]
        for node in (n1, n2):
            ends = {vb_id: part_of(node, vb_id).high_seqno for vb_id in every}
            assert ends == {vb_id: seqno // 2 for vb_id, seqno in high.items()}, "both copies"
        port = n1.ports.kv
        ran = await ctl(port, "vb", "branch", "--vb", f"0-{PARTITIONS - 1}", "--at", "0")
        assert (
            ran.out == f"{PARTITIONS} partitions branched, {sum(ends.values())} changes undone\n"
        ), ran
        assert not any(part.high_seqno for part in n2.engine.partitions)
        ran = await ctl(port, "vb", "branch", "--vb", "3-10", "--at", "1")
        assert (ran.code, ran.out) == (8, "0 partitions branched, 0 changes undone\n")
        assert "dcpctl: 8 partitions were refused in all" in ran.err
        for options in ((), ("--at", "1", "--fraction", "0.1"), ("--fraction", "0")):
            assert (await ctl(port, "vb", "branch", "--vb", "3-10", *options)).code == 2
        for wrong in ({}, {"at": 1, "fraction": 0.1}, {"fraction": 0}, {"fraction": 1.5}):
            assert (await ask(n1, "branch", {"vbs": [1], **wrong})).status == 400


async def test_streams_and_faults_are_reached_from_any_node(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await of_two(cluster)
        ports = [node.ports.kv for node in cluster.nodes.values()]
        vb_id = min(cluster.active("n2"))
        async with Consumer(f"127.0.0.1:{ports[0]}", name="far") as consumer:
            reading = asyncio.create_task(anext(consumer.changes(), None))
            rows: set[int] = set()
            while len(rows) < PARTITIONS:  # its streams are on two nodes
                ran = await ctl(ports[0], "stream", "list", "--each", "-o", "json")
                rows = {json.loads(line)["vb"] for line in ran.out.splitlines()}
            ran = await ctl(ports[0], "stream", "stall", "--vb", str(vb_id))
            assert ran.out == "stalled 1 stream\n", ran
            ran = await ctl(ports[0], "stream", "drop", "--name", "nobody")
            assert ran.code == 3, "no node has it"
            reading.cancel()
        added = await ctl(ports[0], "fault", "add", "--opcode", "GET", "--status", "ETMPFAIL")
        assert added.out == "added fault 1\n", added
        for port in ports:
            assert (await ctl(port, "fault", "list")).out.count("ETMPFAIL") == 1
        assert (await ctl(ports[1], "fault", "remove")).out == "removed 1 fault\n"
        for node in cluster.nodes.values():
            faults = await raw_client.ask(
                node.ports.admin, "GET", "/api/v1/faults", raw_client.login()
            )
            assert faults.body["faults"] == []


async def test_a_branch_that_cannot_be_made_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await of_two(cluster)
        master, _ = nodes(cluster)
        async with cluster.client("n1") as kv:
            for _ in range(3):
                await kv.set(b"hello", b"v")
        branches = master.replicated.branches
        refused = await ask(master, f"{VB}/branch", {"at": 9})
        assert (refused.status, part_of(master).high_seqno) == (409, 3)
        lose = MasterFailoverRequest(vb=VB, lose=1)
        with pytest.raises(ClusterRefusedError, match="not in test mode"):
            await master._cluster_operations().changes.failover(lose)

        monkeypatch.setattr(replicated_branches, "BRANCH_WAIT_S", 0.3)
        for client in cluster.clients.values():
            client.is_away = True  # the metadata store
        with pytest.raises(
            (BranchRefusedError, BranchUnknownError),
            match=r"has not taken the branch|have rolled back",
        ):
            await branches.branch(VB, 1)
        assert part_of(master).high_seqno == 3
        for client in cluster.clients.values():
            client.is_away = False
