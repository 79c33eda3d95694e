"""What a node tells about its cluster: roles, lags, partitions that take no writes, receipts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clients.errors import DcpdError
from dcp.server.cluster.joining.enrolment import EnrolmentError, join_cluster
from dcp.server.cluster.operators.cluster_status import _age_problems, _unwritable_elsewhere
from dcp.server.cluster.receipt_files import (
    DISCARD_FOLDER,
    FORMER_DISCARD_FOLDER,
    keep_cut_off,
    keep_election,
    receipts_in,
)
from dcp.server.files.kept_twice import twin_of
from dcp.server.operate.cluster_reports import ClusterReport
from dcp.server.operate.cluster_requests import NodeRequest
from failover.coordinator.records import (
    ClusterKeys,
    CollectionsRecord,
    FiguresRecord,
    KeyKind,
    ManifestRecord,
    MemberRecord,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.metastore import KeyValue
from failover.rules.history import FAILOVER_ENTRIES_MAX
from failover.rules.replication_record import create
from support.cluster_here import PARTITIONS, ClusterHere
from support.stored_bytes import pack_mutation
from support.waiting import until_so
from vbucket.model.ids import ids_in
from vbucket.model.manifest import INITIAL_MANIFEST
from vbucket.model.receipt import CutOff, ElectionLoss


def status_of(cluster: ClusterHere, name: str) -> ClusterReport:
    return cluster.nodes[name]._cluster_operations().status()


def shared(cluster: ClusterHere, master: str, other: str) -> set[int]:
    """Return the partitions of a master that another node has in sync, as the master knows."""
    replicated, follower = (cluster.nodes[name].replicated for name in (master, other))
    if replicated is None or follower is None:
        return set()
    return {
        vb_id
        for vb_id, stored in replicated.session.view.partitions.items()
        if stored.content.record.master == replicated.member
        and follower.member in stored.content.record.isr
    }


@pytest.mark.parametrize(
    ("in_sync", "told", "expected"),
    [("abc", 0, 0), ("b", 0, 1), ("abc", 5, 5), ("b", 5, 5)],
    ids=["in sync", "the record says it", "the master says it", "both"],
)
def test_partitions_of_others_that_take_no_writes(in_sync: str, told: int, expected: int) -> None:
    record = replace(create("bac"), isr=frozenset(in_sync))
    figures = FiguresRecord(
        member="b", sets_per_s=0, events_per_s=0, disk_used_bytes=0, disk_size_bytes=0,
        unwritable=told, behind={}, lags={},
    )  # fmt: skip
    view: Any = SimpleNamespace(
        cluster=None, alive=dict.fromkeys("abc"),
        partitions={0: SimpleNamespace(content=SimpleNamespace(record=record))},
        figures={"b": SimpleNamespace(content=figures)},
    )  # fmt: skip
    assert _unwritable_elsewhere(view, "a") == expected
    assert _unwritable_elsewhere(view, "b") == 0  # its own are counted elsewhere
    del view.alive["b"]
    assert _unwritable_elsewhere(view, "a") == 0  # without a living master they are, too


def test_a_store_with_an_older_list_of_collections_is_named() -> None:
    keys, view = ClusterKeys(b"/"), ClusterView(ClusterKeys(b"/"))
    two = INITIAL_MANIFEST.create_collection("_default", "a").create_collection("_default", "b")
    put = KeyValue(
        keys.of_member(KeyKind.COLLECTIONS, "a"),
        encode_record(CollectionsRecord(member="a", uid=two.uid)), 1, 5, 1,
    )  # fmt: skip
    lists = [
        KeyValue(keys.manifest, encode_record(ManifestRecord.of(each)), 1, 6, 1)
        for each in (two.drop_collection("_default", "a"), two)
    ]
    own: Any = SimpleNamespace(is_store_emptied=False, older_since_s=0.0)
    for newer in lists:
        view.replace([put, newer], 6)
        assert [*_age_problems(view, own)] == []
    view.start_over([put], 5)
    (problem,) = _age_problems(view, own)
    assert "an older list of collections than is in force on node a" in problem.what
    assert "meta restore" in problem.try_this


async def test_roles_and_lags(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await until_so(lambda: len(shared(cluster, "n1", "n2")) > PARTITIONS // 10)
        async with cluster.client("n1") as kv:
            await kv.set_many({b"k%d" % number: b"v" for number in range(100)})
        found = status_of(cluster, "n1")
        assert [node.name for node in found.nodes] == ["n1", "n2"]
        assert [node.roles for node in found.nodes] == [["coordinator"], []]
        assert [lag.node for lag in found.followers] == ["n2"]
        assert found.followers[0].copies > 0
        await until_so(lambda: status_of(cluster, "n1").followers[0].behind_changes == 0)
        # Each node knows the figures of all, as the nodes write them into the store.
        await until_so(
            lambda: all(
                node.figures and node.figures.disk_size_bytes
                for node in status_of(cluster, "n2").nodes
            )
        )
        page = cluster.nodes["n2"]._cluster_operations().page()
        assert page.map is not None
        assert page.map.nodes == ["n1", "n2"]
        assert len(page.map.masters) == PARTITIONS
        assert page.map.in_sync == [
            len(partition.in_sync) for partition in cluster.nodes["n2"]._cluster_operations().map()
        ]
        assert "joined" in {event.kind for event in page.events}
        replicated = cluster.nodes["n2"].replicated
        assert replicated is not None
        replicated.stop()  # it stands still, and its connections stay
        async with cluster.client("n1", timeout_s=5.0) as kv:
            writing = asyncio.create_task(
                kv.set_many({b"k%d" % number: b"w" for number in range(100)})
            )
            # At each turn, and not at the end of the writes: a copy that is silent for long has no
            # figures.
            while not (lag := status_of(cluster, "n1").followers[0]).behind_changes:
                assert not writing.done(), "they wait for the copy"
                await asyncio.sleep(0)
            await writing
        assert 0 < lag.behind_partitions <= lag.copies
        assert lag.heard_ms is None or lag.heard_ms > 0


async def test_what_takes_no_writes_while_the_store_is_away(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await until_so(lambda: len(shared(cluster, "n1", "n2")) > PARTITIONS // 10)
        for client in cluster.clients.values():
            client.is_away = True
        async with cluster.client("n1", timeout_s=2.0) as kv:
            await kv.set(b"k", b"v")
            found = status_of(cluster, "n1")
            assert "nobody is elected" in found.problems[0].what
            assert found.problems[0].try_.startswith("Start it again")

            of_both = shared(cluster, "n1", "n2")
            await cluster.kill("n2")  # nobody can take it out of the in-sync sets
            await until_so(lambda: not cluster.active("n1") & of_both)
            outcomes = await kv.set_many({b"k%d" % number: b"w" for number in range(50)})
            assert any(isinstance(outcome, DcpdError) for outcome in outcomes)
        found = status_of(cluster, "n1")
        entry = next(each for each in found.unwritable if each.why.endswith("store is away"))
        assert ids_in(entry.vbs) >= of_both  # and those that asked for it when the store went away
        assert entry.count == len(ids_in(entry.vbs))
        assert entry.why.endswith(
            "n2; it cannot leave the in-sync set while the metadata store is away"
        )
        assert entry.try_ == "Start the metadata store, or node n2"

        for client in cluster.clients.values():
            client.is_away = False
        await until_so(lambda: of_both <= cluster.active("n1"))
        few = "1 of 2 copies are in sync; 2 must be"
        await until_so(lambda: {each.why for each in status_of(cluster, "n1").unwritable} == {few})
        start = "Start n2 again; what is committed can be read meanwhile"
        await until_so(
            lambda: {each.try_ for each in status_of(cluster, "n1").unwritable} == {start}
        )
        advice = "dcpctl cluster remove n2"  # once its lease is over
        await until_so(
            lambda: any(advice in problem.try_ for problem in status_of(cluster, "n1").problems)
        )


async def test_partitions_with_all_copies_down_are_told_with_advice(
    tmp_path: Path,
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=1)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await cluster.until_all_in_sync(1)
        await cluster.kill("n1")
        await until_so(
            lambda: (
                not any(
                    node.is_alive for node in status_of(cluster, "n2").nodes if node.name == "n1"
                )
            )
        )
        entries = status_of(cluster, "n2").unwritable
        assert sum(entry.count for entry in entries) == PARTITIONS
        assert "so is every copy in sync: n1" in entries[0].why
        assert "--unclean" in entries[0].try_


ENTRIES = tuple(
    pack_mutation(vb_id=9, key=b"\0k", value=b"v", cas=1, seqno=seqno, rev_seqno=1)
    for seqno in (4, 5)
)
CUT = CutOff(9, 4, ((7, 3), (3, 0)), ENTRIES)
LOSS = ElectionLoss(3, 6, ((8, 0),), 41, 44)


def test_receipts_of_the_version_before_are_listed(tmp_path: Path) -> None:
    path = keep_cut_off(tmp_path, CUT)
    keep_election(tmp_path, LOSS, 1000.5)
    former = path.parent.rename(tmp_path / FORMER_DISCARD_FOLDER)
    kept = keep_cut_off(tmp_path, CUT._replace(epoch=5))
    found = receipts_in(tmp_path, "n1").receipts
    assert {report.kind for report in found} == {"cut_off", "unclean_election"}
    files = {report.file for report in found if report.kind == "cut_off"}
    assert files == {str(former / path.name), str(kept)}
    assert not any(report.problem for report in found)


def test_receipts_are_listed_from_the_files(tmp_path: Path) -> None:
    assert receipts_in(tmp_path, "n1").receipts == []
    cut_path = keep_cut_off(tmp_path, CUT)
    election_path = keep_election(tmp_path, LOSS, 1000.5)
    folder = tmp_path / DISCARD_FOLDER
    (folder / "notes.txt").write_text("of the operator")
    found = {report.kind: report for report in receipts_in(tmp_path, "n1").receipts}
    cut = found["cut_off"]
    assert (cut.vb, cut.epoch, cut.versions) == (9, 4, [("7", "3"), ("3", "0")])
    assert (cut.first_seqno, cut.last_seqno, cut.count) == ("4", "5", 2)
    assert cut.file == str(cut_path)
    lost = found["unclean_election"]
    assert (lost.vb, lost.epoch, lost.at, lost.file) == (3, 6, 1000.5, str(election_path))
    assert (lost.end_seqno, lost.committed_seqno, lost.known_lost) == ("41", "44", 3)


def test_a_receipt_with_the_longest_failover_log_is_read(tmp_path: Path) -> None:
    versions = tuple((2**64 - 1 - number, 2**63) for number in range(FAILOVER_ENTRIES_MAX))
    keep_cut_off(tmp_path, CUT._replace(versions=versions))
    (receipt,) = receipts_in(tmp_path, "n1").receipts
    assert receipt.problem == ""
    assert len(receipt.versions) == FAILOVER_ENTRIES_MAX


@pytest.mark.parametrize("damage", [b"", b"x", b"dcpd-cut\x00\x01\x00\x00\x00\x02{}"])
def test_a_receipt_that_cannot_be_read_is_listed_with_the_reason(
    tmp_path: Path, damage: bytes
) -> None:
    paths = keep_cut_off(tmp_path, CUT), keep_election(tmp_path, LOSS, 1000.5)
    for path in paths:
        path.write_bytes(damage)
    found = receipts_in(tmp_path, "n1").receipts
    assert [report.problem for report in found] == ["", ""], "their twins are read"
    for path in paths:
        twin_of(path).write_bytes(damage)
    found = receipts_in(tmp_path, "n1").receipts
    assert sorted(report.kind for report in found) == ["cut_off", "unclean_election"]
    assert all(report.problem for report in found)


async def test_an_unclean_election_leaves_a_receipt_on_disk(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        replicated = node.replicated
        assert replicated is not None
        replicated._effects[ElectionLoss](LOSS)
        operations = node._cluster_operations()
        folder = node.about.data_dir / DISCARD_FOLDER
        await until_so(lambda: folder.is_dir() and any(folder.glob("*.json")))
        report = await operations.receipts()
        assert report.node == "n1"
        (receipt,) = report.receipts
        assert (receipt.vb, receipt.end_seqno) == (3, "41")


async def test_empty_node_beside_its_dead_self_is_told_what_to_type(
    tmp_path: Path,
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await cluster.until_all_in_sync(2)
        await cluster.kill("n2")
        await until_so(lambda: not status_of(cluster, "n1").nodes[1].is_alive)
        cluster._ports["n3"] = cluster._ports["n2"]
        await cluster.start("n3")  # on the same machine, with an empty folder
        with pytest.raises(EnrolmentError, match="another member has the name n2") as refused:
            await join_as(cluster, "n3", "n2")
        assert "`dcpctl cluster remove n2` makes the name free" in refused.value.try_this
        await cluster.become_member("n3")

        def told() -> str:
            return "".join(
                f"{each.what}. {each.try_}" for each in status_of(cluster, "n1").problems
            )

        await until_so(lambda: "node n3 runs at its address, with another data folder" in told())
        assert f"{PARTITIONS} copies are kept for n2" in told()
        assert "`dcpctl cluster remove n2` lets n3" in told()
        operations = cluster.nodes["n1"]._cluster_operations()
        await operations.changes.remove(NodeRequest(node="n2"))
        names = ["n1", "n3"]
        await until_so(lambda: [node.name for node in status_of(cluster, "n1").nodes] == names)
        await cluster.until_all_in_sync(2)
        await until_so(lambda: told() == "")


async def join_as(cluster: ClusterHere, node: str, name: str) -> None:
    """Write into the store that a node is a member of this name."""
    found = cluster.nodes[node]
    member = MemberRecord(
        member=found._storage.node.node_id, address=f"127.0.0.1:{found.ports.kv}", name=name
    )
    await join_cluster(cluster.meta.client(), cluster._root, found.engine, member)
