"""Three nodes and three members of etcd as processes, behind a network that can be cut.

The first test runs a fixed order of faults under load, with every check of `scripts/soak cluster`.
The others look at one fault each.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from clients.address import parse_address
from clients.errors import DcpdError
from clients.kv.client import KvClient
from clients.link.pipelined_link import Link
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.cluster_here import PARTITIONS
from support.waiting import until
from tests.soak.cluster.nodes import FaultyCluster
from tests.soak.cluster.run import own_disks, run_faults
from vbucket.model.ids import vbucket_of

pytestmark = [pytest.mark.crash, pytest.mark.timeout(900)]
ANSWER_S = 120.0
"""Longest time until a node answers that is not frozen, on a machine that does other things too."""
FOLLOWED_S = 120.0
"""Longest time until a master that is lost is followed, on such a machine."""
STARVED_S = 15.0
"""One and a half times a lease of these nodes."""
ORDER = (
    "kill node", "cut one way", "freeze node", "kill etcd", "drain", "kill store", "break",
    "cut from clients", "late", "freeze etcd", "cut from etcd", "no etcd", "deaf node",
)  # fmt: skip
"""Not all that there are, because time is short: test_packets.py cuts a node off from everybody."""
SEED = 6604
"""Draws short times for these faults."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        disks = own_disks(stack)
        folder = tmp_path_factory.mktemp("faults")
        yield stack.enter_context(FaultyCluster(folder, disks, partitions=PARTITIONS))


async def test_faults_under_load_lose_nothing_and_answer_nothing_wrong(cluster) -> None:
    """The first test of these: its consumers know all documents that there are."""
    report = await run_faults(cluster, SEED, ORDER)
    assert set(report.faults) >= set(ORDER)
    assert report.answered > 1000
    assert report.deaths > 0
    assert report.effects > 1000
    assert report.backups > 0


@pytest.fixture
async def kv(cluster):
    await asyncio.to_thread(cluster.until_in_sync)
    await asyncio.to_thread(cluster.until_even)
    async with KvClient.connect(cluster.address("a"), timeout_s=3) as kv:
        yield kv
    cluster.thaw_all()
    cluster.network.heal()


def keys_of(cluster: FaultyCluster, name: str, count: int, word: str) -> list[bytes]:
    """Return keys whose partitions have this master."""
    mine = {row["vb"] for row in cluster.partition_map("a") if row["master"] == name}
    keys = (b"%s-%d" % (word.encode(), number) for number in range(100_000))
    found = [key for key in keys if cluster.vb_of(key) in mine]
    return found[:count]


async def raw(link: Link, opcode: Opcode, key: bytes, value: bytes = b"", extras: bytes = b""):
    async with asyncio.timeout(ANSWER_S):
        return await link.request(
            opcode, vb_id=vbucket_of(key, PARTITIONS),
            key=b"\0" + key if link.has_collections else key, value=value, extras=extras,
        )  # fmt: skip


async def _until_written(kv: KvClient, key: bytes, value: bytes) -> None:
    """Write until it is answered."""
    async with asyncio.timeout(ANSWER_S):
        while True:
            try:
                await kv.set(key, value)
            except DcpdError:
                continue
            return


def until_not_master(cluster: FaultyCluster, name: str) -> None:
    """Return once node a knows that another node has no partitions any more."""
    last: dict[str, int] = {}

    def is_so() -> bool:
        last.update(cluster.masters("a"))  # nothing, if it did not answer this time
        return last.get(name) == 0

    try:
        until(is_so, FOLLOWED_S)
    except AssertionError:
        pytest.fail(f"{name} is still master: {last}")


async def test_nodes_that_run_a_tenth_of_the_time_elect_nobody(cluster, kv):
    """Nobody has died, however late everybody is. Afterwards all copies are in sync again."""

    def epochs() -> dict[int, int]:
        """Of partitions that no first copy gets back meanwhile."""
        rows = cluster.partition_map("a")
        return {row["vb"]: row["epoch"] for row in rows if row["master"] == row["copies"][0]}

    before = await asyncio.to_thread(epochs)
    for node in cluster.nodes.values():
        cluster.starve_process(node.pid)
    await asyncio.sleep(STARVED_S)
    cluster.thaw_all()
    await asyncio.to_thread(cluster.until_in_sync)
    after = await asyncio.to_thread(epochs)
    assert before
    assert {vb_id: after.get(vb_id) for vb_id in before} == before


async def test_a_frozen_master_that_goes_on_answers_nothing_stale(cluster, kv):
    """It has reads in its sockets that were sent after newer writes were answered elsewhere."""
    keys = keys_of(cluster, "b", 40, "frozen")
    for key in keys:
        await _until_written(kv, key, b"old")
    links = [await Link.connect(parse_address(cluster.address("b"))) for _ in range(4)]
    for key in keys:
        assert (await raw(links[0], Opcode.GET, key)).value == b"old"

    pid = cluster.nodes["b"].pid
    cluster.freeze_process(pid)
    for key in keys:
        await _until_written(kv, key, b"new")
    reads = [asyncio.create_task(raw(link, Opcode.GET, key)) for key in keys for link in links]
    writes = [
        asyncio.create_task(raw(links[0], Opcode.SET, key, b"late", bytes(8))) for key in keys
    ]
    await asyncio.sleep(0)  # they are sent
    cluster.thaw_process(pid)
    for read in reads:
        frame = await read
        assert frame.status != Status.OK or frame.value != b"old"
    for write in writes:
        assert (await write).status != Status.OK, "it is no master any more"
    for key in keys:
        assert (await kv.get(key)).value == b"new"
    for link in links:
        link.close()


async def test_a_master_cut_off_from_others_takes_nothing_and_followed(cluster, kv):
    """Clients still reach it: it must answer neither reads nor writes once others may."""
    keys = keys_of(cluster, "c", 10, "cut")
    for key in keys:
        await _until_written(kv, key, b"old")
    link = await Link.connect(parse_address(cluster.address("c")))
    for other in "ab":
        cluster.network.cut("c", other)
    await asyncio.to_thread(until_not_master, cluster, "c")
    for key in keys:
        await _until_written(kv, key, b"new")
        frame = await raw(link, Opcode.GET, key)
        assert frame.status != Status.OK, "it is fenced"
        frame = await raw(link, Opcode.SET, key, b"stray", bytes(8))
        assert frame.status != Status.OK
    cluster.network.heal()
    await asyncio.to_thread(cluster.until_in_sync)
    for key in keys:
        assert (await kv.get(key)).value == b"new"
    link.close()


def trouble_of(cluster: FaultyCluster) -> str | None:
    """Return what node a says of etcd; None if it does not answer this time."""
    status = cluster.status("a")
    found: str | None = status["store"]["trouble"] if status else None
    return found


async def test_without_etcd_masters_go_on_and_status_says_so(cluster, kv):
    def are_first_copies() -> bool:
        rows = cluster.partition_map("a")
        return all(row["master"] == row["copies"][0] for row in rows)

    # Who is handing a partition over waits for the answer of the store, and answers nobody.
    await asyncio.to_thread(until, are_first_copies, FOLLOWED_S)
    for name in cluster.nodes:
        for member in cluster.member_names:
            cluster.network.cut(name, member)
    await asyncio.to_thread(until, lambda: trouble_of(cluster))
    for number in range(50):
        await _until_written(kv, b"without-%d" % number, b"v")

    def is_told() -> bool:
        problems = cluster.status("a").get("problems", [])
        return any("does not answer" in problem["what"] for problem in problems)

    await asyncio.to_thread(until, is_told)
    cluster.network.heal()
    await asyncio.to_thread(until, lambda: trouble_of(cluster) == "")


async def test_full_disk_stops_masters_writes_and_leaves_in_sync_sets(cluster, kv):
    if "c" not in cluster.disks:
        pytest.skip("a disk of its own is mounted by root only: run the tests as root")
    from support.forgetful_disk import fill

    (mine,) = keys_of(cluster, "c", 1, "full")
    (other,) = keys_of(cluster, "a", 1, "full")
    await _until_written(kv, mine, b"before")
    link = await Link.connect(parse_address(cluster.address("c")))
    filler = fill(cluster.disks["c"])
    try:
        # What is prepared for the log takes some more. Then the master refuses, with the reason.
        frame = await raw(link, Opcode.SET, mine, bytes(60_000), bytes(8))
        while frame.status == Status.OK:
            frame = await raw(link, Opcode.SET, mine, bytes(60_000), bytes(8))
        assert frame.status in {Status.ETMPFAIL, Status.SYNC_WRITE_AMBIGUOUS}, frame
        frame = await raw(link, Opcode.SET, mine, b"refused", bytes(8))
        assert frame.status == Status.ETMPFAIL
        assert b"room" in frame.value
        # As a replica it leaves, and the others go on.
        await _until_written(kv, other, b"during")
        vb_id = cluster.vb_of(other)
        record = cluster.partition_map("a")[vb_id]
        assert record["in_sync"] == ["a", "b"]
        assert cluster.partition_map("a")[cluster.vb_of(mine)]["master"] == "c", "it stays master"
        # An operator fails it over, although the write that found no room is in no log.
        await asyncio.to_thread(cluster.change, "failover", vb=cluster.vb_of(mine))
        assert cluster.partition_map("a")[cluster.vb_of(mine)]["master"] in {"a", "b"}
        await _until_written(kv, mine, b"failed over")
    finally:
        filler.unlink()
    await asyncio.to_thread(cluster.until_in_sync)
    assert (await kv.get(mine)).value == b"failed over"
    await _until_written(kv, mine, b"after")
    assert (await kv.get(other)).value == b"during"
    link.close()


async def test_a_store_process_that_stands_still_delays_no_answer(cluster, kv):
    pid = cluster.store_process("b")
    assert pid is not None
    cluster.freeze_process(pid)
    keys = keys_of(cluster, "b", 100, "still")
    for key in keys:
        await _until_written(kv, key, b"v")
    cluster.thaw_process(pid)
    assert cluster.masters("a")["b"] > PARTITIONS // 4, "nobody was elected"


async def test_a_wiped_folder_is_a_new_member_and_nothing_is_lost(cluster, kv):
    """The last test of these: the old member is gone for good."""
    documents = {b"wiped-%d" % number: b"%d" % number for number in range(500)}
    for result in await kv.set_many(documents):
        assert not isinstance(result, DcpdError), result
    cluster.kill("b")
    cluster.wipe("b")
    await asyncio.to_thread(until_not_master, cluster, "b")
    found = {key: document.value for key, document in (await kv.get_many(documents)).items()}
    assert found == documents
    del cluster.nodes["b"]
    await asyncio.to_thread(cluster.add, "d")
    # Refused while the lease of b is not over: until then it may still run.
    await asyncio.to_thread(cluster.insist, "remove", node="b")
    await asyncio.to_thread(cluster.until_in_sync)
    assert set(await asyncio.to_thread(cluster.masters, "a")) == {"a", "c", "d"}
    found = {key: document.value for key, document in (await kv.get_many(documents)).items()}
    assert found == documents
