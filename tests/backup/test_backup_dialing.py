"""Where partitions are streamed from: nothing that stands still delays what does not need it."""

from __future__ import annotations

import asyncio

import pytest

from clients.address import parse_address
from clients.backup.archives.archive import create_archive
from clients.backup.dialing import Dialing, Home
from clients.backup.feed import Feed
from clients.backup.run import PAUSE_MAX_S, Backup, CutSearch
from clients.consumer.batch_reader import Cut
from clients.errors import AuthenticationError, ConnectError, TopologyError
from clients.link.dials import Dials
from clients.link.topology import ClusterNode, Topology
from clients.position import Position

A, B, C = ("a", 1), ("b", 1), ("c", 1)
NODES = tuple(ClusterNode(host, port) for host, port in (A, B, C))


class FakeLink:
    is_closed = False
    has_collections = False

    def close(self):
        self.is_closed = True


class World:
    """Nodes that answer when the test says so."""

    def __init__(self, *active):
        self.feeds = [Feed(vb_id, 1, [], []) for vb_id in range(len(active))]
        self.dials = []
        """(place, future) of each, in order."""
        self.questions = []
        self.now_s = 0.0
        self.sessions = set()
        self.wake = asyncio.Event()
        dials = Dials(parse_address("a:1"), self.wake, longest_s=PAUSE_MAX_S)
        dials.connect = self.connect
        self.cluster = dials.cluster
        self.cluster.adopt(topology(*active))
        self.dialing = Dialing(dials, self.find)

    async def find(self):
        future = asyncio.get_running_loop().create_future()
        self.questions.append(future)
        self.cluster.topology = await future

    async def connect(self, place):
        future = asyncio.get_running_loop().create_future()
        self.dials.append((place, future))
        return await future

    async def step(self):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        homes = self.dialing.step(self.now_s, self.sessions)
        self.sessions |= {home.place for home in homes}
        await asyncio.sleep(0)
        return homes

    def placed(self, *numbers):
        return [self.feeds[number] for number in numbers]


def topology(*active):
    return Topology((1, 1), NODES, active)


async def test_all_nodes_are_dialled_at_the_same_time():
    world = World(0, 1, 2, 0)
    world.dialing.add(world.feeds)
    assert await world.step() == []
    assert [place for place, _ in world.dials] == [A, B, C]
    link = FakeLink()
    world.dials[2][1].set_result(link)
    assert await world.step() == [Home(C, link, world.placed(2))]
    assert world.wake.is_set()
    assert not world.dialing.is_idle
    world.dials[0][1].set_result(link)
    world.dials[1][1].set_result(link)
    assert await world.step() == [Home(A, link, world.placed(0, 3)), Home(B, link, world.placed(1))]
    assert world.dialing.is_idle


async def test_who_lost_its_connection_waits_for_no_topology():
    """The node that would tell stands still; the one that was lost is there again."""
    world = World(0, 1)
    world.sessions = {A}
    world.dialing.add_lost(world.placed(1))
    await world.step()
    assert [place for place, _ in world.dials] == [B]
    assert len(world.questions) == 1
    link = FakeLink()
    world.dials[0][1].set_result(link)
    assert await world.step() == [Home(B, link, world.placed(1))]
    world.dialing.add_lost(world.placed(0))
    assert await world.step() == [Home(A, None, world.placed(0))]
    assert len(world.questions) == 1, "one question at a time"
    await world.dialing.close()


async def test_a_partition_that_moved_waits_for_the_topology():
    world = World(0, 1)
    world.sessions = {A, B, C}
    world.dialing.add_moved(world.placed(1))
    assert await world.step() == []
    assert not world.dialing.is_idle
    world.questions[0].set_result(topology(0, 2))
    assert await world.step() == [Home(C, None, world.placed(1))]
    assert world.dialing.is_idle


async def test_a_partition_without_a_node_keeps_no_other():
    world = World(-1, 1)
    world.sessions = {B}
    world.dialing.add(world.feeds)
    assert await world.step() == [Home(B, None, world.placed(1))]
    assert isinstance(world.dialing.failure, TopologyError)
    for _ in range(10):
        world.questions[-1].set_result(topology(-1, 1))
        world.now_s += PAUSE_MAX_S
        assert await world.step() == []
        assert await world.step() == []
    assert len(world.questions) == 11, "it is asked for again and again, after a pause"
    world.questions[-1].set_result(topology(1, 1))
    assert await world.step() == [Home(B, None, world.placed(0))]
    world.dialing.reset()
    assert world.dialing.failure is None


async def test_unreachable_node_is_tried_after_a_pause_others_at_once():
    world = World(0, 1)
    world.dialing.add(world.placed(0))
    await world.step()
    world.dials[0][1].set_exception(ConnectError("refused"))
    world.dialing.add(world.placed(1))
    await world.step()
    assert [place for place, _ in world.dials] == [A, B]
    assert isinstance(world.dialing.failure, ConnectError)
    world.questions[0].set_exception(ConnectError("refused too"))
    world.now_s += PAUSE_MAX_S
    await world.step()
    assert [place for place, _ in world.dials] == [A, B, A], "by the topology that is known"
    await world.dialing.close()


async def test_what_a_retry_cannot_mend_is_raised_and_nothing_stays():
    world = World(0, 1, 2)
    world.dialing.add(world.feeds)
    await world.step()
    world.dials[0][1].set_exception(AuthenticationError("who are you"))
    with pytest.raises(AuthenticationError):
        await world.step()
    link = FakeLink()
    world.dials[2][1].set_result(link)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await world.dialing.close()
    assert link.is_closed
    assert world.dials[1][1].cancelled()


ONE = (ClusterNode("a", 1),)


@pytest.mark.parametrize(
    ("found", "is_alone"),
    [
        (Topology((1, 1), ONE, (0, 0)), True),
        (Topology((1, 1), NODES, (0, 1)), False),
        (Topology((1, 1), ONE, (0, 0), ((), ())), False),
        (Topology((1, 1), ONE, (-1, -1)), False),
    ],
    ids=["a node alone", "a cluster", "the others are dead", "it knows nothing of others yet"],
)
async def test_the_last_node_of_a_cluster_is_no_node_alone(tmp_path, found, is_alone):
    """Its replicas may be behind their masters, and it has no moment of all partitions: the run
    reads masters only, and asks for a cut.
    """
    backup = Backup(create_archive(str(tmp_path / "archive"), 0), parse_address("a:1"))
    link = FakeLink()

    async def refreshed_link():
        backup._dials.cluster.adopt(found)
        return link

    backup._dials.refreshed_link = refreshed_link
    await backup._refresh()
    assert backup._is_one_node is is_alone
    assert link.is_closed


def test_a_cut_that_a_stream_goes_beyond_is_not_taken():
    """The streams began while the run waited for it: the state at such a cut is lost."""
    search = CutSearch(parse_address("a:1"), asyncio.Event())
    feeds = {vb_id: Feed(vb_id, 1, [], []) for vb_id in range(3)}
    feeds[0].target, feeds[1].target = 5, 7

    def cut(*seqnos):
        return Cut([], 1, {vb_id: Position(seqno=seqno) for vb_id, seqno in enumerate(seqnos)})

    assert not search.take(cut(5, 6, 3), feeds)
    assert [feed.cut_seqno for feed in feeds.values()] == [None] * 3
    assert search.take(cut(6, 7, 3), feeds)
    assert [feed.cut_seqno for feed in feeds.values()] == [6, 7, 3]
