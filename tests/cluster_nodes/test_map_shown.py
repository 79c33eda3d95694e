"""The map that nodes tell: a version is one map, on every node and over restarts of all."""

from __future__ import annotations

import copy
import json
import logging
import threading
from pathlib import Path

import msgspec
import pytest

from dcp.server.cluster import node_map
from dcp.server.cluster.cluster_file import KEYS_PREFIX, read_cluster_file
from dcp.server.cluster.joining.becoming_member import NewMember, init_cluster
from dcp.server.cluster.joining.enrolment import NewCluster, join_cluster, withdraw
from dcp.server.cluster.meta_access import MetaAccess
from dcp.server.cluster.node_map import HEARD_NS, MAP_FILE, RETRY_NS, MapShown, RaisedLife, SentMap
from dcp.server.files.kept_twice import write_kept
from dcp.server.net.cluster_config import ClusterConfig
from dcp.server.node import Node
from dcp.server.observe.elapsed import elapsed_ns
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.housekeeping import Tasks
from failover.coordinator.map_life import NEVER_SENT, MapLife, MapVersion
from failover.coordinator.records import (
    ClusterKeys,
    ClusterRecord,
    KeyKind,
    MemberRecord,
    StoredPartition,
    encode_partition,
    encode_record,
)
from failover.coordinator.view import ClusterView
from failover.metadata.keyring import Keyring
from failover.metadata.metastore import KeyValue, Put, Range, RangeResult, Txn
from failover.metadata.revision_store import RevisionStore
from failover.rules.replication_record import ReplicationRecord, create, shrink
from support.cluster_here import SECRET, ClusterHere, LoopMetaStore
from support.memory_node import MemoryNode
from support.waiting import until_so

KEYS = ClusterKeys(b"/test/")
OWN = MemberRecord(member="a", address="127.0.0.1:11210", name="a", admin_port=8091)
TOLD = MapVersion(7, 30)


def item(key: bytes, value: bytes, revision: int) -> KeyValue:
    return KeyValue(key, value, revision, revision, 1, 0)


def member_item(name: str, revision: int) -> KeyValue:
    record = MemberRecord(
        member=name, address=f"127.0.0.1:{11210 + ord(name)}", name=name, admin_port=ord(name)
    )
    return item(KEYS.of_member(KeyKind.MEMBER, name), encode_record(record), revision)


def partition_item(record: ReplicationRecord, revision: int) -> KeyValue:
    value = encode_partition(StoredPartition(record, f"at {revision}"))
    return item(KEYS.of_partition(KeyKind.PARTITION, 0), value, revision)


class Shown:
    """A node's view, and the map that it tells."""

    def __init__(self, told: MapVersion = NEVER_SENT, life: int = 7) -> None:
        self.view = ClusterView(KEYS)
        self.config = ClusterConfig("127.0.0.1", "a", "default", 1024)
        self.life = MapLife(self.view, told)
        self.shown = MapShown(self.view, self.life, self.config, "cluster", OWN)
        assert self.shown.update()
        self.items = [
            item(KEYS.cluster, encode_record(ClusterRecord(copies=2, life=life)), 3),
            member_item("a", 4), member_item("b", 5), partition_item(create(("a", "b")), 9),
        ]  # fmt: skip

    def master(self) -> int:
        chains = json.loads(self.config.bucket_config())["vBucketServerMap"]["vBucketMap"]
        return int(chains[0][0])


def test_a_version_is_told_once_and_later_ones_only() -> None:
    node = Shown()
    assert node.config.config_version() == (1, 1)
    assert not node.shown.update()
    node.view.replace(node.items, 12)
    assert node.shown.update()
    assert node.config.config_version() == (7, 9)
    assert node.master() == 0
    node.view.replace(node.items, 20)
    assert not node.shown.update(), "other keys have changed"


def test_record_read_ahead_of_the_view_is_told_once() -> None:
    """What else has changed up to its revision is not known before."""
    node = Shown()
    node.view.replace(node.items, 12)
    assert node.shown.update()
    own_write = partition_item(create(("b", "a")), 15)
    node.view.learn([own_write], 15)
    assert node.view.revision == 12
    assert not node.shown.update()
    assert (node.config.config_version(), node.master()) == ((7, 9), 0)
    node.view.replace([*node.items[:3], member_item("c", 14), own_write], 15)
    assert node.shown.update()
    assert (node.config.config_version(), node.master()) == ((7, 15), 1)


def test_new_masters_and_addresses_are_urgent_replicas_are_not() -> None:
    node = Shown()
    node.view.replace(node.items, 12)
    assert node.shown.is_urgent((0,)), "clients know no master of it"
    assert node.shown.update()
    assert not node.shown.is_urgent((0,))
    node.view.learn([partition_item(shrink(create(("a", "b")), "b"), 15)], 15)
    assert not node.shown.is_urgent((0,))
    node.view.learn([partition_item(create(("b", "a")), 16)], 16)
    assert node.shown.is_urgent((0,))
    assert not node.shown.is_urgent(())
    assert node.shown.is_urgent((1,)), "its record is gone"
    node.view.replace([*node.items[:3], member_item("c", 17), node.items[3]], 17)
    assert node.shown.is_urgent(()), "there is one more node"
    assert node.shown.update()
    assert not node.shown.is_urgent((0,))
    raised = item(KEYS.cluster, encode_record(ClusterRecord(copies=2, life=8)), 18)
    node.view.replace([raised, *node.items[1:]], 18)
    assert node.shown.is_urgent(())


def test_a_map_below_what_the_folder_has_told_is_not_told() -> None:
    node = Shown(told=TOLD)
    node.view.replace(node.items, 12)
    assert "set back" in node.life.look()
    assert not node.shown.update()
    assert node.config.config_version() == (1, 1)
    raised = item(KEYS.cluster, encode_record(ClusterRecord(copies=2, life=8)), 13)
    node.view.replace([raised, *node.items[1:]], 13)
    assert node.shown.update()
    assert node.config.config_version() == (8, 13)


# -- the file ----------------------------------------------------------------------------------


def fail(error: Exception) -> None:
    raise error


LOG = EventLog(logging.getLogger("test.told"))


def sent_map(folder: Path, cluster: str = "c1", keep_s: float = 0.0) -> SentMap:
    return SentMap(folder, cluster, Tasks(fail), LOG, keep_s)


async def test_the_folder_has_the_newest_version_that_was_told(tmp_path: Path) -> None:
    told = sent_map(tmp_path)
    assert told.version == NEVER_SENT
    for rev in range(1, 30):
        told.note(MapVersion(7, rev))
    told.note(TOLD)
    told.note(MapVersion(7, 2))
    await until_so(lambda: sent_map(tmp_path).version == TOLD)
    assert sent_map(tmp_path, "c2").version == NEVER_SENT, "the folder is another cluster's now"


async def test_the_end_of_the_process_writes_what_is_not_written_yet(tmp_path: Path) -> None:
    told = sent_map(tmp_path, keep_s=3600.0)
    told.note(MapVersion(7, 1))
    await until_so(lambda: told._kept == (7, 1))
    told.note(TOLD)
    told.finish()
    assert sent_map(tmp_path).version == TOLD
    await told._tasks.stop()


async def test_end_of_process_waits_for_write_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one may have an older version. And one that has not begun must not come later."""
    begun, may_end = threading.Event(), threading.Event()

    def slowly(path: Path, data: bytes) -> None:
        begun.set()
        assert may_end.wait(20)
        write_kept(path, data)

    monkeypatch.setattr(node_map, "write_kept", slowly)
    told = sent_map(tmp_path, keep_s=0.0)
    told.note(MapVersion(7, 1))
    await until_so(begun.is_set)
    told.note(TOLD)
    threading.Timer(0.05, may_end.set).start()
    told.finish()
    assert sent_map(tmp_path).version == TOLD
    assert told._write(MapVersion(7, 2)) == ""
    assert sent_map(tmp_path).version == TOLD
    await told._tasks.stop()


async def test_a_file_that_cannot_be_read_counts_as_none_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / MAP_FILE).write_bytes(b'{"format":1,"clus')
    assert sent_map(tmp_path).version == NEVER_SENT
    assert "map.json cannot be read" in caplog.text


async def test_file_that_cant_be_written_is_told_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = sent_map(tmp_path)
    (tmp_path / MAP_FILE).mkdir()
    told.note(TOLD)
    await until_so(lambda: "map.json cannot be written" in caplog.text)
    (tmp_path / MAP_FILE).rmdir()
    await until_so(lambda: sent_map(tmp_path).version == TOLD)
    assert caplog.text.count("cannot be written") == 1


# -- the store ---------------------------------------------------------------------------------


class Meta:
    """A store that takes requests, and answers nothing."""

    def __init__(self) -> None:
        self.asked: list[Txn] = []

    def submit(self, request: Txn, _done: object) -> None:
        self.asked.append(request)


def test_life_that_was_not_raised_is_tried_again_after_second() -> None:
    node, meta = Shown(told=TOLD), Meta()
    raised = RaisedLife(node.life, meta)  # type: ignore[arg-type]
    raised.tick(0, 50.0)
    assert not meta.asked, "the view is not loaded"
    node.view.replace(node.items, 12)
    node.life.look()
    for now_ns in (1, HEARD_NS):
        raised.tick(now_ns, 50.0)
    assert not meta.asked, "nodes may say that they have seen newer records"
    for now_ns in (0, 1, RETRY_NS, RETRY_NS + 1):
        raised.tick(1 + HEARD_NS + now_ns, 50.0)
    assert len(meta.asked) == 2
    (put,) = meta.asked[0].then
    assert isinstance(put, Put)
    assert msgspec.json.decode(put.value)["life"] == 50


async def test_a_join_that_is_taken_back_takes_no_version_back(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        meta, root, engine = cluster.meta.client(), KEYS.root, MemoryNode().engine
        record = ClusterRecord(copies=2, partitions=engine.num_vbuckets)
        put = Put(KEYS.cluster, encode_record(record))
        cluster.meta.store.apply(elapsed_ns(), Txn((), (put,)))
        await join_cluster(meta, root, engine, OWN)
        before = version_in(cluster.meta.store, root)
        await withdraw(meta, root, OWN)
        assert version_in(cluster.meta.store, root) > before


def version_in(store: RevisionStore, root: bytes) -> MapVersion:
    """Return the version of the map for a node that starts."""
    view = ClusterView(ClusterKeys(root))
    read = store.apply(elapsed_ns(), Range(root, is_prefix=True))
    assert isinstance(read, RangeResult)
    view.replace(read.items, read.revision)
    return MapLife(view).version()


# -- whole nodes -------------------------------------------------------------------------------

Told = dict[tuple[int, int], str]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Collect version -> map of all nodes, and compare: a version is one map."""
    found: Told = {}
    show = ClusterConfig.show

    def noted(config: ClusterConfig, *shown: object) -> None:
        show(config, *shown)  # type: ignore[arg-type]
        document = json.loads(config.bucket_config())
        for entry in document["nodesExt"]:
            entry.pop("thisNode", None)
        version = document["revEpoch"], document["rev"]
        if version != (1, 1):  # nodes alone, and before anything is known
            text = json.dumps(document, sort_keys=True)
            assert found.setdefault(version, text) == text, f"{version} is two maps"

    monkeypatch.setattr(ClusterConfig, "show", noted)
    return found


def versions(cluster: ClusterHere) -> set[tuple[int, int]]:
    return {node._config.config_version() for node in cluster.nodes.values()}


async def test_after_restarts_map_versions_are_unique_and_rise(tmp_path: Path, told: Told) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        await cluster.become_member("n1", copies=2)
        await cluster.start("n2")
        await cluster.become_member("n2")
        await cluster.until_all_in_sync(2)
        await until_so(lambda: len(versions(cluster)) == 1)
        (before,) = versions(cluster)
        earlier = set(told)
        assert len(earlier) > 2
        for node in cluster.nodes.values():
            assert node.replicated is not None
            node.replicated.stop()  # without handing over
            await node.stop()
        for name in cluster.nodes:
            await cluster.start(name)
        await cluster.until_all_in_sync(2)
        # A map in which only replicas have changed comes up to a second later.
        await until_so(lambda: len(versions(cluster)) == 1 and versions(cluster) != {before})
        (after,) = versions(cluster)
        assert after > before
        assert after[0] == before[0], "the store was not set back"
        assert all(version >= before for version in told.keys() - earlier)


async def stop_all(cluster: ClusterHere) -> None:
    for node in cluster.nodes.values():
        await node.stop()
    cluster.meta.close()


def life_in(node: Node) -> int:
    assert node.replicated is not None
    stored = node.replicated.session.view.cluster
    return 0 if stored is None else stored.content.life


async def test_clients_follow_a_store_that_was_restored_from_a_copy(
    tmp_path: Path, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    async with ClusterHere(tmp_path) as cluster:
        await cluster.start("n1")
        node = await cluster.become_member("n1", copies=1)
        await cluster.until_all_in_sync(1)
        copy_of_it = copy.deepcopy(cluster.meta.store)
        key = ClusterKeys(cluster._root).cluster
        for number in range(9):
            record = ClusterRecord(copies=1, masters_return_s=float(number))
            cluster.meta.store.apply(elapsed_ns(), Txn((), (Put(key, encode_record(record)),)))
        newest = version_in(cluster.meta.store, cluster._root)
        cluster.meta.advance_soon()
        await until_so(lambda: node._config.config_version() == newest)
        await stop_all(cluster)
        cluster.meta = LoopMetaStore()
        cluster.meta.store = copy_of_it
        node = await cluster.start("n1")
        await until_so(lambda: node._config.config_version() > newest)
        await cluster.until_all_in_sync(1)
        assert life_in(node) > newest.life
        assert caplog.text.count("the metadata store was set back: clients know map") == 1
        shown = node._config.config_version()
        await node.stop()
        node = await cluster.start("n1")
        await until_so(lambda: node._config.config_version() > shown)
        assert life_in(node) == shown[0], "one life more is enough"


async def test_a_new_cluster_has_a_higher_life_than_any_before(tmp_path: Path) -> None:
    async with ClusterHere(tmp_path) as cluster:
        node = await cluster.start("n1")
        newcomer = NewMember(
            node.engine,
            "m1",
            tmp_path / "folder",
            node._settings,
            node.ports,
            node._users,
            node.access,
            LOG,
        )
        (tmp_path / "folder").mkdir()
        access = MetaAccess._of(cluster.meta.client(), "memory", Keyring([SECRET]), "")

        async def opened(*_: object) -> MetaAccess:
            return access

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dcp.server.cluster.joining.becoming_member._opened", opened)
            await init_cluster(
                newcomer, NewCluster(1, None), meta="etcd://127.0.0.1:1",
                unix_s=lambda: 1_800_000_000.5,
            )  # fmt: skip
        file = read_cluster_file(tmp_path / "folder")
        assert file is not None
        assert file.root.startswith(KEYS_PREFIX)
        assert version_in(cluster.meta.store, file.root).life == 1_800_000_000
