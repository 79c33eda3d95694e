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
from dcp.wire.message import StreamFlag
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.memory_node import MemoryNode, Peer

pytestmark = pytest.mark.skipif(
    shell._live_run is None, reason="the loops in C are not built (scripts/compile)"
)

VB = 1
OPAQUES = (7, 7, 9)
steps = st.lists(
    st.tuples(
        st.sampled_from(["set"] * 6 + ["delete", "commit", "commit", "commit", "merge", "branch"]),
        st.sampled_from([b"a", b"b", b"c"]),
        st.binary(max_size=40),
    ),
    max_size=30,
)


def followed(*features: Feature, has_ends: bool) -> list[Peer]:
    """A client that writes, and some that follow."""
    node = MemoryNode(partitions=4)
    writer, *followers = peers = [node.connect() for _ in range(1 + len(OPAQUES))]
    writer.hello(Feature.COLLECTIONS)
    for number, (follower, opaque) in enumerate(zip(followers, OPAQUES, strict=True)):
        follower.hello(*features)
        assert follower.open(b"consumer %d" % number).status == Status.OK
        follower.control(b"enable_noop", b"true")
        if has_ends:
            follower.send(pack_request(Opcode.DCP_CONTROL, key=b"x_snapshot_end", value=b"true"))
        assert follower.stream(VB, opaque=opaque).status == Status.OK
    return peers


def sent(followers: list[Peer]) -> list[bytes]:
    found = [b"" for _ in followers]
    for place, follower in enumerate(followers):
        while follower.producer.has_output:
            found[place] += b"".join(follower.producer.pump(1 << 20))
    return found


def told(story: list[tuple[str, bytes, bytes]], peers: list[Peer]) -> list[list[bytes]]:
    writer, *followers = peers
    node, found = writer.node, [sent(followers)]
    for kind, key, value in story:
        if kind == "set":
            writer.ask(Opcode.SET, vb_id=VB, key=b"\0" + key, value=value, extras=bytes(8))
        elif kind == "delete":
            writer.ask(Opcode.DELETE, vb_id=VB, key=b"\0" + key)
        elif kind == "merge":
            node.merge()
        elif kind == "branch":
            node.commit()
            found.append(sent(followers))
            at = max(0, node.engine.partitions[VB].high_seqno - 1)
            node.engine.keyspace.branch(VB, at)
            node.commit()
            found.append(sent(followers))
            for follower, opaque in zip(followers, OPAQUES, strict=True):
                follower.stream(VB, at, opaque=opaque, flags=StreamFlag.FROM_LATEST)
        else:
            node.commit()
            found.append(sent(followers))
    node.commit()
    return [*found, sent(followers)]


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


def test_streams_of_one_form_share_a_cut() -> None:
    peers = followed(Feature.COLLECTIONS, Feature.JSON, has_ends=True)
    told([("set", b"a", b"v"), ("commit", b"", b"")], peers)
    peers[0].ask(Opcode.SET, vb_id=VB, key=b"\0b", value=b"w", extras=bytes(8))
    peers[0].node.commit()
    first, second, other = ((peer.producer.pump(1 << 20))[0] for peer in peers[1:])
    assert first is second
    assert bytes(other) == bytes(first).replace((7).to_bytes(4, "big"), (9).to_bytes(4, "big"))


def test_a_branch_is_cut_anew() -> None:
    """Seqnos come again after a branch, with other changes."""
    peers = followed(Feature.COLLECTIONS, Feature.JSON, has_ends=True)
    story = [("set", b"a", b"v"), ("commit", b"", b""), ("set", b"b", b"older")]
    story += [("branch", b"", b""), ("commit", b"", b""), ("set", b"b", b"newer")]
    last = told(story, peers)[-1]
    assert all(b"newer" in found and b"older" not in found for found in last)


def test_a_plain_change_takes_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = followed(Feature.COLLECTIONS, Feature.JSON, has_ends=True)
    story = [("set", b"a", b"v"), ("commit", b"", b"")]
    told(story, peers)
    monkeypatch.setattr(shell.Producer, "_take_turn", lambda *_: pytest.fail("the long way"))
    assert all(told(story, peers)[-2])
