"""dcpctl cluster set, rebalance, move, drain, failover, remove: what is shown, asked, done, and
refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clients.cli.dcpctl import EXIT_UNAVAILABLE
from clients.errors import DcpdError
from dcp.server.cluster.cluster_file import read_cluster_file
from dcp.server.cluster.operators import cluster_changes
from dcp.server.node import Node
from dcp.server.observe.event_log import MembershipOverError
from failover.coordinator.plans.requests import failover
from failover.metadata.metastore import (
    TXN_OPERATIONS_MAX,
    OutcomeUnknown,
    StoreRequest,
    Txn,
    if_created_at,
)
from support.cluster_here import PARTITIONS, ClusterHere
from support.server import Ran, ctl
from support.waiting import until_so

pytestmark = pytest.mark.asyncio(loop_scope="module")

REFUSED = 4
"""Exit code of a conflict."""


async def run(cluster: ClusterHere, name: str, *words: str, typed: str | None = None) -> Ran:
    return await ctl(cluster.nodes[name].ports.kv, "cluster", *words, typed=typed)


async def done(cluster: ClusterHere, *words: str) -> str:
    ran = await run(cluster, "n1", *words)
    assert ran.code == 0, ran.err
    return ran.out


async def refused(cluster: ClusterHere, *words: str, code: int = REFUSED) -> str:
    ran = await run(cluster, "n1", *words, "--yes")
    assert (ran.code, ran.out) == (code, ""), ran
    assert ran.err.startswith("dcpctl: ")
    return ran.err


async def whole_cluster_is_shown(cluster: ClusterHere) -> None:
    """Ask a node for `dcpctl status` and `top` that holds replicas only: documents count once."""
    port = cluster.nodes["n2"].ports.kv
    status = (await ctl(port, "status", "-o", "json")).document
    assert (status["items"], status["partitions"]["active"]) == (
        100,
        cluster.nodes["n2"].engine.num_vbuckets,
    )
    assert status["health"] in {"healthy", "degraded"}, status["problems"]
    assert [node["name"] for node in status["nodes"]] == ["n1", "n2"]
    top = (await ctl(port, "top", "-o", "json")).document
    assert [(node["name"], node["state"]) for node in top["nodes"]] == [("n1", "up"), ("n2", "up")]


def revision(cluster: ClusterHere) -> int:
    return cluster.meta.store.revision


def records(cluster: ClusterHere, name: str = "n1") -> dict[int, Any]:
    replicated = cluster.nodes[name].replicated
    assert replicated is not None
    view = replicated.session.view
    names = {member: stored.content.name for member, stored in view.members.items()}
    return {
        vb_id: [names[member] for member in stored.content.record.copies]
        for vb_id, stored in view.partitions.items()
    }


def numbers(cluster: ClusterHere, name: str = "n1") -> Any:
    """Return what requests change at once: the cluster's numbers, and which members are drained."""
    replicated = cluster.nodes[name].replicated
    assert replicated is not None
    view = replicated.session.view
    drained = {each.content.name: each.content.is_drained for each in view.members.values()}
    return view.cluster, drained, view.plan, view.commands


async def of_two(cluster: ClusterHere, copies: int = 1) -> None:
    """Start two members, and let each have its share."""
    await cluster.start("n1")
    await cluster.become_member("n1", copies=copies)
    await cluster.start("n2")
    await cluster.become_member("n2")
    await cluster.until_all_in_sync(copies)
    status = cluster.nodes["n1"]._cluster_operations().status
    await until_so(lambda: len(status().nodes) == 2 and status().plan is None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ClusterHere]:
    """Two members, and at first one copy of each partition, on n1. The tests that share them are
    made for any state that earlier ones leave. The first and the last one are what they are.
    """
    async with ClusterHere(tmp_path_factory.mktemp("two"), partitions=1024) as cluster:
        await of_two(cluster)
        yield cluster


async def test_a_preview_of_a_new_secret_changes_none(two: ClusterHere) -> None:
    before = [secrets_of(node) for node in two.nodes.values()]
    text = "the change to secret 1 of the cluster, on n1, n2"
    assert await done(two, "secret", "--dry-run") == f"{text}\n"
    document = (await run(two, "n2", "secret", "--dry-run", "-o", "json")).document
    assert document == {"v": 1, "what": text, "is_written": False, "nodes": ["n1", "n2"]}
    assert [secrets_of(node) for node in two.nodes.values()] == before


def secrets_of(node: Node) -> tuple[str, ...]:
    """Return the secrets that a node accepts, and those that its file has."""
    assert node.replicated is not None
    file = read_cluster_file(node.about.data_dir)
    assert file is not None
    return (*node.replicated.access.keyring.secrets, *file.secrets)


def one_of(cluster: ClusterHere, name: str) -> int:
    """Return a partition whose only copy is on a node."""
    return next(vb_id for vb_id, copies in records(cluster).items() if copies == [name])


async def test_a_preview_is_shown_and_nothing_is_done_unasked(two: ClusterHere) -> None:
    cluster = two
    before = records(cluster)
    preview = await done(cluster, "rebalance", "--dry-run")
    assert "512 copies are filled" in preview
    assert "n1\t1024 -> 512\t1024 -> 512\nn2\t0 -> 512\t0 -> 512" in preview
    document = (await run(cluster, "n1", "rebalance", "--dry-run", "-o", "json")).document
    assert document["is_written"] is False
    assert len(document["moves"]) == 512
    assert document["moves"][0]["before"] == ["n1"]
    assert document["moves"][0]["after"] == ["n2"]

    # Nobody can answer; somebody says no.
    ran = await run(cluster, "n1", "rebalance")
    assert ran.code == 2
    assert "standard input is no terminal" in ran.err
    assert "--yes" in ran.err
    ran = await run(cluster, "n1", "rebalance", typed="n\n")
    assert ran.code == 1
    assert "Do it? [y/N]" in ran.err
    assert "nothing changed" in ran.err
    assert ran.err.index("n2\t0 -> 512\t0 -> 512") < ran.err.index("Do it?")
    assert records(cluster) == before
    assert "there is nothing to do" in await done(cluster, "set", "--copies", "1")

    ran = await run(cluster, "n1", "rebalance", "--wait", typed="y\n")
    assert ran.code == 0, ran.err
    assert ran.out.endswith("done\n")
    assert "of 512 partitions" in ran.err
    await cluster.until_all_in_sync(1)
    copies = [chain for (chain,) in records(cluster).values()]
    assert (copies.count("n1"), copies.count("n2")) == (512, 512)
    assert "there is nothing to do" in await done(cluster, "rebalance")


async def test_unknown_nodes_and_partitions_are_refused(two: ClusterHere) -> None:
    cluster = two
    before = numbers(cluster), records(cluster)
    unknown = "there is no node 'n9' in this cluster; its nodes are n1, n2"
    for words in (
        ("move", "7", "--to", "n9"), ("drain", "n9"), ("undrain", "n9"), ("remove", "n9"),
        ("failover", "n9"), ("failover", "n9", "--unclean"),
    ):  # fmt: skip
        error = await refused(cluster, *words, code=3)
        assert unknown in error
        assert "try: Name one of them" in error
    assert "no node '10.9.9.9:1'" in await refused(cluster, "drain", "10.9.9.9:1", code=3)
    for words in (("move", "1024", "--to", "n2"), ("failover", "--vb", "1024")):
        ran = await run(cluster, "n1", *words, "--yes")
        assert (ran.code, ran.out) == (2, "")
        assert "1024 is not in the range 0<=x<=1023" in ran.err
    for words in (("failover",), ("failover", "n1", "--vb", "3")):
        assert (await run(cluster, "n1", *words, "--yes")).code == 2
    assert (numbers(cluster), records(cluster)) == before
    # HOST:PORT names a node, too.
    address = f"127.0.0.1:{cluster.nodes['n2'].ports.kv}"
    assert "drain n2" in await done(cluster, "drain", address, "--dry-run")


async def test_a_shell_completes_the_names_of_nodes(two: ClusterHere) -> None:
    cluster = two
    port = cluster.nodes["n1"].ports.kv
    shell = {
        "_DCPCTL_COMPLETE": "bash_complete", "COMP_CWORD": "3", "DCPCTL_TIMEOUT": "30",
        "DCPCTL_SERVER": f"127.0.0.1:{port}", "COMP_WORDS": "dcpctl cluster drain n",
    }  # fmt: skip
    ran = await ctl(port, environment=shell)
    assert ran.out.splitlines() == ["plain,n1", "plain,n2"]
    # A user without a password: a line that is being typed is no place to ask for it.
    ran = await ctl(port, environment={**shell, "DCPCTL_USER": "ada"}, typed="secret\n")
    assert (ran.out.strip(), ran.err) == ("", "")


async def test_nothing_changes_while_the_store_is_away(two: ClusterHere) -> None:
    cluster = two
    client = cluster.clients["n1"]
    before = records(cluster)
    client.is_away = True
    error = await refused(cluster, "rebalance", code=EXIT_UNAVAILABLE)
    assert "the metadata store does not answer: it is away" in error
    assert "Nothing can change before it does" in error
    client.is_away = False
    status = cluster.nodes["n1"]._cluster_operations().status
    await until_so(lambda: status().store.revision >= revision(cluster))
    assert status().plan is None
    assert records(cluster) == before


@pytest.mark.parametrize("losses", [1, 2])
async def test_an_answer_that_is_lost_is_looked_up(
    two: ClusterHere, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    """The request is written once, whatever becomes of its answers."""
    cluster = two
    client = cluster.clients["n1"]
    vb_id = one_of(cluster, "n1")
    submit, left = client.submit, losses

    def lose(request: StoreRequest, answered: Any) -> None:
        nonlocal left
        plans = isinstance(request, Txn) and any(b"plan" in put.key for put in request.then)
        if left and plans:
            left -= 1
            if losses == 1:  # it happens
                submit(request, lambda _result: answered(OutcomeUnknown("lost")))
            else:  # it does not
                answered(OutcomeUnknown("lost"))
        else:
            submit(request, answered)

    monkeypatch.setattr(client, "submit", lose)
    await done(cluster, "move", str(vb_id), "--to", "n2", "--yes", "--wait")
    assert left == 0
    await until_so(lambda: records(cluster)[vb_id] == ["n2"])


async def test_request_is_made_anew_when_cluster_changes_meanwhile(
    two: ClusterHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = two
    client = cluster.clients["n1"]
    vb_id = one_of(cluster, "n1")
    submit, left = client.submit, 2

    def come_late(request: StoreRequest, answered: Any) -> None:
        nonlocal left
        if left and isinstance(request, Txn) and any(b"plan" in put.key for put in request.then):
            left -= 1
            changed = if_created_at(request.then[-1].key, 1 << 40)
            request = request._replace(compares=(*request.compares, changed))
        submit(request, answered)

    monkeypatch.setattr(client, "submit", come_late)
    await done(cluster, "move", str(vb_id), "--to", "n2", "--yes", "--wait")
    assert left == 0
    await until_so(lambda: records(cluster)[vb_id] == ["n2"])


async def test_the_numbers_of_a_living_cluster_change(two: ClusterHere) -> None:
    cluster = two
    await done(cluster, "set", "--copies", "2", "--yes", "--wait")
    await cluster.until_all_in_sync(2)
    assert "2 copies, 1 in sync for a write" in await _set(cluster, "--min-in-sync", "1")
    assert "a majority in sync" in await _set(cluster, "--min-in-sync", "0")
    # More copies than nodes: said, and done as far as possible.
    out = await done(cluster, "set", "--copies", "3", "--yes")
    assert "3 copies are wanted and 2 nodes may have one" in out
    found = await done(cluster, "status")
    assert "! 3 copies are wanted, but the number of nodes is 2" in found
    assert "try: Add a node with `dcpctl cluster join`" in found
    before = numbers(cluster), records(cluster)
    for words, text in (
        (("--copies", "5"), "5 copies are not possible; 1 to 4 are"),
        (("--copies", "0"), "0 copies are not possible; 1 to 4 are"),
        (("--min-in-sync", "4"), "min in-sync 4 is not possible with 3 copies"),
        (("--copies", "2", "--min-in-sync", "3"), "min in-sync 3 is not possible with 2"),
        (("--masters-return", "-1"), "masters cannot return after -1 s"),
    ):
        assert text in await refused(cluster, "set", *words)
    assert "name a number" in (await run(cluster, "n1", "set", "--yes")).err
    assert (numbers(cluster), records(cluster)) == before


async def test_a_clean_failover_loses_nothing_and_needs_a_copy_in_sync(two: ClusterHere) -> None:
    cluster = two
    await done(cluster, "set", "--copies", "2", "--min-in-sync", "0", "--yes", "--wait")
    await cluster.until_all_in_sync(2)
    await done(cluster, "rebalance", "--yes", "--wait")
    await until_so(lambda: len(cluster.active("n2")) == 512)
    async with cluster.client("n1") as kv:
        await kv.set_many({b"k%d" % number: b"v" for number in range(100)})
        versions = {vb: (await kv.failover_log(vb))[0] for vb in range(0, 1024, 64)}
        await done(cluster, "failover", "n2", "--yes", "--wait")
        await until_so(lambda: len(cluster.active("n1")) == 1024)
        await done(cluster, "failover", "--vb", "3", "--yes", "--wait")
        await until_so(lambda: cluster.active("n2") == {3})
        assert len(await kv.get_many([b"k%d" % number for number in range(100)])) == 100
        for vb, version in versions.items():
            assert (await kv.failover_log(vb))[0] == version
    error = await refused(cluster, "failover", "n1", "--unclean")
    assert "no change has to be lost. Leave out --unclean" in error


async def test_unclean_failover_says_what_may_be_lost_and_needs_name(
    two: ClusterHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = two
    await done(cluster, "set", "--copies", "2", "--min-in-sync", "1", "--yes", "--wait")
    await cluster.until_all_in_sync(2)
    await cluster.kill("n1")
    await until_so(lambda: len(cluster.active("n2")) == 1024)
    async with cluster.client("n2") as kv:
        await kv.set_many({b"late%d" % number: b"v" for number in range(100)})
    await cluster.kill("n2")  # it alone was in sync
    await cluster.start("n1")
    node = cluster.nodes["n1"]
    assert node.replicated is not None
    view = node.replicated.session.view
    member = node.replicated.member
    await until_so(lambda: member in view.alive and len(view.alive) == 1)
    await until_so(lambda: member in view.reports)
    assert "copy in sync: n2" in await done(cluster, "status")

    for words, word in ((("n2",), "n2"), (("--vb", "3"), "3")):
        ran = await run(cluster, "n1", "failover", *words, "--unclean", typed="yes\n")
        assert ran.code == 1
        assert f"Type {word} to go on" in ran.err
        assert "also those that were answered" in ran.err
        assert "the leases of the former masters (n2) are over" in ran.err
        assert "nothing changed" in ran.err
    assert "n1 ends at seqno" in ran.err
    unclean = ("failover", "n2", "--unclean")
    ran = await run(cluster, "n1", *unclean, "-o", "json", typed="no\n")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.index("also those that were answered") < ran.err.index("Type n2 to go on")

    # More partitions than were shown are lost when the name was typed.
    cuts = iter([1])

    def some_at_first(*arguments: Any, **choices: Any) -> Any:
        answer = failover(*arguments, **choices)
        return answer._replace(txns=answer.txns[: next(cuts, None)])

    with monkeypatch.context() as patched:
        patched.setattr(cluster_changes, "failover", some_at_first)
        ran = await run(cluster, "n1", *unclean, typed="n2\n")
    assert ran.code == REFUSED, ran
    first = TXN_OPERATIONS_MAX
    assert f"elected uncleanly: partitions 0-{first - 1}" in ran.err
    assert f"{1024 - first} partitions ({first} is the first) have lost their last" in ran.err
    assert not view.commands
    assert not cluster.active("n1")

    ran = await run(cluster, "n1", *unclean, "--wait", "-o", "json", typed="n2\n")
    assert ran.code == 0, ran.err
    assert "elected uncleanly: partitions 0-1023" in ran.err
    assert ran.document["unclean_vbs"] == "0-1023"
    await until_so(lambda: len(cluster.active("n1")) == 1024)
    async with cluster.client("n1") as kv:
        await kv.set(b"new", b"v")
        with pytest.raises(DcpdError):
            await kv.get(b"late1")
    await until_so(lambda: _receipts(cluster) == 1024)
    ran = await run(cluster, "n1", "receipts")
    assert ran.out.count("unclean_election") == 1024
    assert ran.code == 8
    assert "node n2 was not asked" in ran.err


async def test_a_partition_moves_a_node_is_drained_and_removed(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await of_two(cluster)
        async with cluster.client("n1") as kv:
            await kv.set_many({b"k%d" % number: b"v" for number in range(100)})
            await whole_cluster_is_shown(cluster)
            await done(cluster, "move", "7", "--to", "n2", "--yes", "--wait")
            await until_so(lambda: cluster.active("n2") == {7})
            assert records(cluster)[7] == ["n2"]
            assert "partitions; empty it first" in await refused(cluster, "remove", "n2")

            await done(cluster, "drain", "n2", "--yes", "--wait")
            await until_so(lambda: len(cluster.active("n1")) == PARTITIONS)
            assert "drained" in await done(cluster, "status")
            assert "n2 is drained and gets no copy" in await refused(
                cluster, "move", "7", "--to", "n2"
            )
            await done(cluster, "undrain", "n2", "--yes")
            assert "drained" not in await done(cluster, "status")
            await done(cluster, "drain", "n2", "--yes")
            await done(cluster, "remove", "n2", "--yes", "--wait")
            found = cluster.nodes["n1"]._cluster_operations().status()
            assert [node.name for node in found.nodes] == ["n1"]
            with pytest.raises(MembershipOverError, match="n2 was removed from its cluster"):
                async with asyncio.timeout(30):
                    await cluster.nodes["n2"].run_until_stopped()
            # It is not served again, whatever its folder says.
            await cluster.nodes["n2"].stop()
            node = await cluster.start("n2")
            with pytest.raises(MembershipOverError, match="an empty --data folder"):
                async with asyncio.timeout(30):
                    await node.run_until_stopped()
            assert not cluster.active("n2")
            assert "is the only node" in await refused(cluster, "remove", "n1")
            keys = [b"k%d" % number for number in range(100)]
            assert len(await kv.get_many(keys)) == 100


async def test_a_second_request_is_refused_while_a_plan_is_under_way(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await of_two(cluster)
        replicated = cluster.nodes["n2"].replicated
        assert replicated is not None
        replicated.stop()  # it stands still, so nothing is filled
        await done(cluster, "rebalance", "--yes")
        status = cluster.nodes["n1"]._cluster_operations().status
        await until_so(lambda: status().plan is not None)
        error = await refused(cluster, "drain", "n2")
        assert f"rebalance is under way: 0 of {PARTITIONS // 2} partitions are done" in error
        assert "`dcpctl cluster cancel`" in error
        assert f"under way: rebalance, 0 of {PARTITIONS // 2} partitions done" in await done(
            cluster, "status"
        )
        assert "cancel rebalance" in await done(cluster, "rebalance", "--cancel", "--yes")
        assert "nothing to cancel" in await _when_over(cluster)
        assert set(map(tuple, records(cluster).values())) == {("n1",)}


async def test_rebalance_waits_for_a_new_node_and_names_one_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=1)
        await cluster.start("n2")
        await cluster.joins("n2")
        replicated = cluster.nodes["n1"].replicated
        assert replicated is not None
        view = replicated.session.view
        await until_so(lambda: len(view.members) == 2)
        monkeypatch.setattr(cluster_changes, "JOINED_S", 0.0)
        told = await done(cluster, "rebalance", "--dry-run")
        assert "rebalance: there is nothing to do" in told
        assert "n2 gets no copy: it is a member and its process is not seen running" in told
        monkeypatch.setattr(cluster_changes, "JOINED_S", 60.0)
        asked = asyncio.create_task(done(cluster, "rebalance", "--dry-run"))
        await cluster.become_member("n2")
        share = PARTITIONS // 2
        assert f"n2\t0 -> {share}\t0 -> {share}" in await asked


async def _when_over(cluster: ClusterHere) -> str:
    status = cluster.nodes["n1"]._cluster_operations().status
    await until_so(lambda: status().plan is None)
    return await refused(cluster, "cancel")


async def _set(cluster: ClusterHere, *words: str) -> str:
    await done(cluster, "set", *words, "--yes")
    return await done(cluster, "status")


async def test_a_node_that_is_alone_refuses_them(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        error = await refused(cluster, "rebalance")
        assert "this node is in no cluster" in error
        assert "try: `dcpctl cluster init`" in error


def _receipts(cluster: ClusterHere) -> int:
    folder = cluster.nodes["n1"].about.data_dir / "discarded"
    return len(list(folder.glob("*.json"))) if folder.is_dir() else 0
