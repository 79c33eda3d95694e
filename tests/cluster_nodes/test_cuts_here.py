"""Consistent cuts of three nodes: each is one state of all partitions, whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Collection
from pathlib import Path

import pytest
from test_branches_here import ask

from clients.address import ServerAddress
from clients.backup.archives.archive import Archive, create_archive
from clients.backup.dialing import Dialing, Home
from clients.backup.run import Backup
from clients.consumer.consumer import Consumer
from clients.errors import DcpdError
from clients.event import Rollback
from clients.kv.client import KvClient
from clients.link.topology import Place
from clients.mirror.mirror import Mirror
from dcp.server.cluster.cut_rounds import CutPeer, CutRounds
from dcp.server.node import Node
from dcp.server.operate.cluster_requests import MasterFailoverRequest
from failover.replication.cuts import cut_leader
from support.backup_pair import state_as_of
from support.cluster_here import PARTITIONS, ClusterHere
from support.server import ctl
from support.waiting import until_so

WRITERS = 6
BALANCE = 1000
ASIDE, ASIDE_VB = b"aside4", 22
"""A document in a partition in which no account is."""
ACCOUNTS = [[f"account{writer}-{number}" for number in range(6)] for writer in range(WRITERS)]


async def set_surely(kv: KvClient, key: str, value: int) -> None:
    """Write a document that nobody else writes; return when that is answered."""
    while True:
        try:
            await kv.set(key, b"%d" % value)
        except DcpdError:  # no master now, or it may have been made
            await asyncio.sleep(0.01)
        else:
            return


async def move_money(kv: KvClient, accounts: list[str], stop: asyncio.Event) -> None:
    """Take money from an account, and give it to another one when that is answered."""
    held = dict.fromkeys(accounts, BALANCE)
    for source, target in itertools.cycle(itertools.permutations(accounts, 2)):
        if stop.is_set():
            return
        held[source] -= 1
        await set_surely(kv, source, held[source])
        held[target] += 1
        await set_surely(kv, target, held[target])


def check_sums(documents: dict[bytes, bytes]) -> tuple[int, ...]:
    """Each writer has at most one of its money on its way."""
    held: list[int] = []
    for mine in ACCOUNTS:
        own = [int(documents[key.encode()]) for key in mine]
        assert sum(own) <= BALANCE * len(mine), "a cut has a credit without its debit"
        assert sum(own) >= BALANCE * len(mine) - 1, "a cut lacks what was answered before it"
        held += own
    return tuple(held)


async def check_mirror(mirror: Mirror) -> None:
    async with mirror.at_frontier() as time:
        held = {key.encode(): mirror[key] for mine in ACCOUNTS for key in mine}
        check_sums(held)
        await asyncio.sleep(0.005)
        assert {key: mirror[key.decode()] for key in held} == held
        assert time


async def backed_up(cluster: ClusterHere, archive: Archive) -> dict[bytes, bytes]:
    """Make a run of a backup; return the documents that it has."""
    address = ServerAddress("127.0.0.1", cluster.nodes["n1"].ports.kv)
    report = await Backup(archive, address).run()
    assert not report.why_no_cut
    states = await asyncio.to_thread(state_as_of, archive, range(PARTITIONS))
    return {key[1:]: value for state in states.values() for key, value in state.items()}


def set_clock(node: Node, ahead_s: float) -> None:
    """Set the clock with which a node makes changes and draws cuts."""
    begin = type(node.engine).begin_batch
    node.engine.begin_batch = (  # type: ignore[method-assign]
        lambda now_ns: begin(node.engine, now_ns + int(ahead_s * 1e9))
    )


async def test_each_cut_is_one_state_of_three_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Money is moved between partitions of different nodes, the debit first, over a kill, a
    handover, a clock that jumps, a branch and a failover that loses a change of another partition:
    no cut has a credit without its debit. Nodes are told to draw 10 ms one after the other, and a
    backup asks them one after the other.
    """
    send = CutPeer.send

    def send_later(peer: CutPeer, data: bytes) -> None:
        asyncio.get_running_loop().call_later(0.01, send, peer, data)

    monkeypatch.setattr(CutPeer, "send", send_later)
    find, homes = Dialing.step, list[Home]()

    def one_by_one(dialing: Dialing, now_s: float, sessions: Collection[Place]) -> list[Home]:
        homes.extend(find(dialing, now_s, {*sessions, *(home.place for home in homes)}))
        return [homes.pop(0)] if homes else []

    monkeypatch.setattr(Dialing, "step", one_by_one)
    async with ClusterHere(tmp_path, test_mode="on") as cluster:
        await cluster.of_three()
        address = f"127.0.0.1:{cluster.nodes['n1'].ports.kv}"
        stop = asyncio.Event()
        async with cluster.client("n1") as kv:
            for mine in ACCOUNTS:
                await kv.set_many((key, b"%d" % BALANCE) for key in mine)
            for number in range(4):
                await kv.set(ASIDE, b"%d" % number)
            writers = [asyncio.create_task(move_money(kv, mine, stop)) for mine in ACCOUNTS]
            consumer = Consumer(address, cuts=True, validate=True)
            mirror = Mirror(address, tmp_path / "mirror.lmdb", cuts=True)
            await mirror.open()
            documents: dict[bytes, bytes] = {}
            seen: set[tuple[int, ...]] = set()
            steps, undone = iter(STEPS), list[int]()
            next_at, last = 4, 0
            async for cut in consumer.cuts():
                for change in cut.changes:
                    if isinstance(change, Rollback):
                        assert change.vb_id == ASIDE_VB, "nothing else that was answered is undone"
                        undone.append(change.server_seqno)
                    else:
                        documents[change.key] = change.value
                seen.add(check_sums(documents))
                assert cut.time > last
                assert consumer.frontier == cut.time
                last = cut.time
                await check_mirror(mirror)
                if len(seen) < next_at:
                    continue
                next_at = len(seen) + 4
                step = next(steps, None)
                if step is None:
                    break
                await step(cluster)
            assert undone == [3, 2], "a branch, and a failover that lost a change"
            async with mirror.at_frontier():
                assert mirror[ASIDE.decode()] == (await kv.get(ASIDE)).value == b"1"
            archive = create_archive(str(tmp_path / "archive"), 1)
            held = [check_sums(await backed_up(cluster, archive)) for _ in range(3)]
            assert len(set(held)) == 3
            stop.set()
            await asyncio.gather(*writers)
            await kv.set(ACCOUNTS[0][0], b"1")
            await mirror.caught_up(20)
            async with mirror.at_frontier():
                assert mirror[ACCOUNTS[0][0]] == b"1"
            await mirror.close()
            await consumer.close()


async def kill(cluster: ClusterHere) -> None:
    await cluster.kill("n3")
    await until_so(lambda: sum(len(cluster.active(name)) for name in cluster.nodes) == PARTITIONS)


async def restart(cluster: ClusterHere) -> None:
    await cluster.start("n3")
    await cluster.until_all_in_sync(3)


async def hand_over(cluster: ClusterHere) -> None:
    """All that n2 has goes to the others, and it comes back."""
    await cluster.nodes["n2"].stop()
    await cluster.start("n2")
    await cluster.until_all_in_sync(3)


async def jump(cluster: ClusterHere) -> None:
    """A node whose clock is off closes nothing until it is right again."""
    node = cluster.nodes[max(cluster.nodes, key=lambda name: len(cluster.active(name)))]
    assert node.replicated is not None
    cuts = node.replicated.core.master.cuts
    await until_so(lambda: not cuts.why_not)
    set_clock(node, 5)
    await until_so(lambda: "its clock is" in cuts.why_not)
    await until_so(lambda: "it has closed no time for" in problems_of(node))
    assert cuts.why_not in problems_of(node)
    set_clock(node, 0)
    await until_so(lambda: not cuts.why_not)
    await until_so(lambda: "it has closed no time for" not in problems_of(node))


def problems_of(node: Node) -> str:
    return "\n".join(each.what for each in node._cluster_operations().status().problems)


async def branch(cluster: ClusterHere) -> None:
    """The newest change of a partition is undone on all copies."""
    answer = await ask(await master_of_aside(cluster), f"{ASIDE_VB}/branch", {"at": 3})
    assert answer.status == 200, answer


async def lose(cluster: ClusterHere) -> None:
    """A failover loses the newest change, as an unclean election does."""
    before = await master_of_aside(cluster)
    request = MasterFailoverRequest(vb=ASIDE_VB, lose=1)
    await before._cluster_operations().changes.failover(request)
    await until_so(
        lambda: any(
            ASIDE_VB in cluster.active(name) and node is not before
            for name, node in cluster.nodes.items()
        )
    )


async def master_of_aside(cluster: ClusterHere) -> Node:
    found: list[str] = []
    await until_so(
        lambda: found.extend(n for n in cluster.nodes if ASIDE_VB in cluster.active(n)) or found
    )
    return cluster.nodes[found[0]]


STEPS = [kill, restart, hand_over, jump, branch, lose]


def rounds_of(cluster: ClusterHere) -> CutRounds:
    """Return those of the node that leads."""
    leader = min(cluster.nodes.values(), key=member_of)
    assert isinstance(leader.serving.upkeep._cuts, CutRounds)
    return leader.serving.upkeep._cuts


def member_of(node: Node) -> str:
    assert node.replicated is not None
    return node.replicated.member


async def test_a_node_that_says_nothing_delays_others_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is held, and nobody asks, before somebody wants cuts. A node that does not answer
    then is waited for once; cuts of the others go on without it, and with it when it answers.
    """
    monkeypatch.setattr(cut_leader, "SILENT_NS", 10**18)
    async with ClusterHere(tmp_path) as cluster:
        await cluster.of_three()
        async with cluster.client("n1") as kv:
            await kv.set("key", b"1")
            assert all(node.engine.first_open_ns == 0 for node in cluster.nodes.values())
            address = f"127.0.0.1:{cluster.nodes['n1'].ports.kv}"
            async with Consumer(address, cuts=True) as everything:
                whole = everything.cuts()
                await anext(whole)
                rounds = rounds_of(cluster)
                silent = max(cluster.nodes, key=lambda name: member_of(cluster.nodes[name]))
                member = member_of(cluster.nodes[silent])
                asked: list[bytes] = []
                told = cluster.nodes[silent].replicated
                assert told is not None
                passes = rounds._peers[member].send

                def send(data: bytes) -> None:
                    """Nothing gets there, but for the end of what it was told before."""
                    is_held = told.core.master.watermarks.held is not None
                    (passes if is_held else asked.append)(data)

                rounds._peers[member].send = send  # type: ignore[method-assign]
                await until_so(lambda: asked)
                others = set().union(
                    *(cluster.active(name) for name in cluster.nodes if name != silent)
                )
                async with Consumer(address, cuts=True, vbuckets=others) as some:
                    cuts = some.cuts()
                    times = [(await anext(cuts)).time for _ in range(8)]
                assert times == sorted(set(times))
                await kv.set("key", b"2")
                assert len(asked) == 1, "it is asked again when it has answered"
                assert told.core.master.watermarks.held is None, "it was never told"
                # It is dialled again: nobody says so when a machine is gone.
                monkeypatch.setattr(cut_leader, "SILENT_NS", 10**9)
                while everything.frontier <= times[-1]:
                    await anext(whole)
            port = cluster.nodes["n1"].ports.kv
            ran = await ctl(port, "watch", "--cuts", "--until-now", "-o", "json")
            lines = [json.loads(line) for line in ran.out.splitlines()]
            assert [line["event"] for line in lines] == ["mutation", "cut"]
            assert int(lines[-1]["time"]) > times[-1]
