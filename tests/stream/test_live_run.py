"""Snapshots of live streams that are cut in C: what the way in Python sends, and left to it if
anything is unusual.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.stream import producer as shell
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

pytestmark = pytest.mark.skipif(
    shell._live_run is None, reason="the loops in C are not built (scripts/compile)"
)

VB = 1
steps = st.lists(
    st.tuples(
        st.sampled_from(["set"] * 6 + ["delete", "commit", "commit", "merge"]),
        st.sampled_from([b"a", b"b", b"c"]),
        st.binary(max_size=40),
    ),
    max_size=30,
)


def followed(*features: Feature, has_ends: bool) -> tuple[Peer, Peer]:
    """A client that writes, and one that follows."""
    node = MemoryNode(partitions=4)
    writer, follower = node.connect(), node.connect()
    writer.hello(Feature.COLLECTIONS)
    follower.hello(*features)
    assert follower.open().status == Status.OK
    follower.control(b"enable_noop", b"true")
    if has_ends:
        follower.send(pack_request(Opcode.DCP_CONTROL, key=b"x_snapshot_end", value=b"true"))
    assert follower.stream(VB).status == Status.OK
    return writer, follower


def sent(follower: Peer) -> bytes:
    producer = follower.state.producer
    assert producer is not None
    found = b""
    while producer.has_output:
        found += b"".join(producer.pump(1 << 20))
    return found


def told(story: list[tuple[str, bytes, bytes]], peers: tuple[Peer, Peer]) -> bytes:
    writer, follower = peers
    found = sent(follower)
    for kind, key, value in story:
        if kind == "set":
            writer.ask(Opcode.SET, vb_id=VB, key=b"\0" + key, value=value, extras=bytes(8))
        elif kind == "delete":
            writer.ask(Opcode.DELETE, vb_id=VB, key=b"\0" + key)
        elif kind == "merge":
            writer.node.merge()
        else:
            writer.node.commit()
            found += sent(follower)
    writer.node.commit()
    return found + sent(follower)


@settings(max_examples=80, deadline=None)
@given(story=steps, json=st.booleans(), collections=st.booleans(), has_ends=st.booleans())
def test_both_ways_send_the_same(
    story: list[tuple[str, bytes, bytes]], *, json: bool, collections: bool, has_ends: bool
) -> None:
    features = [Feature.COLLECTIONS] * collections + [Feature.JSON] * json
    in_c = told(story, followed(*features, has_ends=has_ends))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "_live_run", None)
        in_python = told(story, followed(*features, has_ends=has_ends))
    assert in_c == in_python


def test_a_plain_change_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = followed(Feature.COLLECTIONS, Feature.JSON, has_ends=True)
    story = [("set", b"a", b"v"), ("commit", b"", b"")]
    told(story, peers)
    monkeypatch.setattr(shell.Producer, "_take_turn", lambda *_: pytest.fail("the long way"))
    assert told(story, peers)
