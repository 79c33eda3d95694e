"""A connection gets each map once, if it asked for that (HELLO 0x1e)."""

from __future__ import annotations

import pytest

from dcp.session.node_facts import CONFIG_VERSION, MapNews
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState

VB = 7
DEDUPE = Feature.DEDUPE_NOT_MY_VBUCKET
WHOLE = Feature.CLUSTERMAP_CHANGE_NOTIFICATION
BRIEF = Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF


class MapNode(MemoryNode):
    """A node that serves nothing, whose map gets newer."""

    rev = 1

    def bucket_config(self) -> bytes:
        return b"map %d" % self.rev

    def config_version(self) -> tuple[int, int]:
        return (1, self.rev)


@pytest.fixture
def node() -> MapNode:
    node = MapNode()
    node.engine.begin_batch(node.now_ns)
    node.engine.partitions[VB].state = VbState.DEAD
    return node


def connect(node: MapNode, *features: int) -> Peer:
    peer = node.connect()
    peer.hello(*features)
    peer.ask(Opcode.SELECT_BUCKET, key=b"default")
    return peer


def refused(peer: Peer) -> bytes:
    answer = peer.ask(Opcode.GET, key=b"k", vb_id=VB)
    assert answer.status == Status.NOT_MY_VBUCKET
    return answer.value


def test_a_refusal_has_the_map_once_for_each_version(node: MapNode) -> None:
    peer, other = connect(node, DEDUPE), connect(node)
    assert [refused(peer) for _ in range(3)] == [b"map 1", b"", b""]
    assert [refused(other) for _ in range(2)] == [b"map 1", b"map 1"], "it did not ask for that"
    node.rev = 2
    assert [refused(peer) for _ in range(2)] == [b"map 2", b""]
    assert refused(connect(node, DEDUPE)) == b"map 2", "another connection has nothing yet"


def test_an_empty_refusal_has_no_datatype(node: MapNode) -> None:
    peer = connect(node, DEDUPE, Feature.JSON)
    answers = [peer.ask(Opcode.GET, key=b"k", vb_id=VB) for _ in range(2)]
    assert [(answer.value, answer.datatype) for answer in answers] == [(b"map 1", 1), (b"", 0)]


def config(peer: Peer, rev: int) -> Frame:
    return peer.ask(Opcode.GET_CLUSTER_CONFIG, extras=CONFIG_VERSION.pack(1, rev))


def test_the_map_that_was_asked_for_is_not_in_refusals(node: MapNode) -> None:
    peer = connect(node, DEDUPE)
    assert peer.ask(Opcode.GET_CLUSTER_CONFIG).value == b"map 1"
    assert refused(peer) == b""
    node.rev = 3
    claims = connect(node, DEDUPE)
    assert config(claims, 2).value == b"map 3"
    assert refused(claims) == b""
    knows = connect(node, DEDUPE)
    assert config(knows, 3).value == b""
    assert refused(knows) == b"", "it said that it has it"
    assert refused(peer) == b"map 3"


def test_the_map_of_the_node_is_not_that_of_the_bucket(node: MapNode) -> None:
    peer = node.connect()
    peer.hello(DEDUPE)
    assert config(peer, 1).value == b""
    assert peer.ask(Opcode.GET_CLUSTER_CONFIG).value == node.global_config()
    peer.ask(Opcode.SELECT_BUCKET, key=b"default")
    assert refused(peer) == b"map 1"


def pushes(news: MapNews) -> list[bytes | None]:
    """Return the bodies of two pushes; None: nothing is pushed."""
    return [None if push is None else push.body for push in (news.push(), news.push())]


def test_each_newer_map_is_pushed_once(node: MapNode) -> None:
    news = MapNews(node)
    news.bucket = node.bucket
    news.hello({WHOLE})
    for rev in (1, 2, 5):
        node.rev = rev
        assert pushes(news) == [b"map %d" % rev, None]
    node.rev = 6
    assert news.with_refusal() == b"map 6"
    assert pushes(news) == [b"map 6", None], "without 0x1e a refusal does not count"
    assert news.with_refusal() == b"map 6"


def test_with_0x1e_pushes_and_refusals_count_for_each_other(node: MapNode) -> None:
    news = MapNews(node)
    news.bucket = node.bucket
    news.hello({WHOLE, DEDUPE})
    assert pushes(news) == [b"map 1", None]
    assert news.with_refusal() == b""
    node.rev = 2
    assert news.with_refusal() == b"map 2"
    assert pushes(news) == [None, None]


def test_a_brief_push_has_no_map_so_the_next_refusal_has_it(node: MapNode) -> None:
    news = MapNews(node)
    news.bucket = node.bucket
    news.hello({BRIEF, DEDUPE})
    push = news.push()
    assert push is not None
    assert (push.version, push.body) == (CONFIG_VERSION.pack(1, 1), b"")
    assert news.push() is None
    assert [news.with_refusal() for _ in range(2)] == [b"map 1", b""]
    node.rev = 2
    assert pushes(news) == [b"", None]


def test_nothing_is_pushed_to_a_client_that_did_not_ask(node: MapNode) -> None:
    news = MapNews(node)
    news.bucket = node.bucket
    news.hello({DEDUPE})
    assert pushes(news) == [None, None]
