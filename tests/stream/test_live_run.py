"""Snapshots of live streams that are cut in C: what the way in Python sends, and left to it if
anything is unusual.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.stream import producer as shell
from dcp.stream.filter import StreamFilter
from dcp.wire.feature import Feature
from dcp.wire.frame import pack_request
from dcp.wire.message import EndReason, StreamFlag, parse_stream_end
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from stream.test_stream_cuts import draw
from support.memory_node import MemoryNode, Peer
from vbucket.engine.partition import VbState
from vbucket.model.control import SnapshotWindow
from vbucket.model.manifest import Manifest

pytestmark = pytest.mark.skipif(
    shell._live_run is None, reason="the loops in C are not built (scripts/compile)"
)

VB = 1
OPAQUES = (7, 7, 9)
steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["set"] * 6
            + ["other", "other", "commit", "commit", "commit"]
            + ["delete", "cut", "merge", "branch", "create", "drop"]
        ),
        st.sampled_from([b"a", b"b", b"c"]),
        st.binary(max_size=40),
    ),
    max_size=30,
)


def followed(
    *features: Feature, has_ends: bool, has_cuts: bool = False, value: bytes = b""
) -> list[Peer]:
    """A client that writes, and some that follow."""
    node = MemoryNode(partitions=4)
    manifest = node.engine.keyspace.manifest.create_scope("inventory")
    node.engine.keyspace.set_manifest(manifest)
    node.engine.keyspace.set_manifest(manifest.create_collection("inventory", "hotel"))
    node.commit()
    writer, *followers = peers = [node.connect() for _ in range(1 + len(OPAQUES))]
    writer.hello(Feature.COLLECTIONS)
    for number, (follower, opaque) in enumerate(zip(followers, OPAQUES, strict=True)):
        follower.hello(*features)
        assert follower.open(b"consumer %d" % number).status == Status.OK
        follower.control(b"enable_noop", b"true")
        if has_ends:
            follower.send(pack_request(Opcode.DCP_CONTROL, key=b"x_snapshot_end", value=b"true"))
        if has_cuts:
            follower.control(b"x_closed_times", b"true")
        assert follower.stream(VB, opaque=opaque, value=value).status == Status.OK
    return peers


def change_manifest(node: MemoryNode, change: Callable[[Manifest], Manifest]) -> None:
    node.engine.keyspace.set_manifest(change(node.engine.keyspace.manifest))


def pumped(followers: list[Peer]) -> list[bytes]:
    found = [b"" for _ in followers]
    for place, follower in enumerate(followers):
        while follower.producer.has_output:
            found[place] += b"".join(follower.producer.pump(1 << 20))
    return found


def told(
    story: list[tuple[str, bytes, bytes]], peers: list[Peer], *, is_copy: bool = False
) -> list[list[bytes]]:
    """`is_copy`: the partition is a replica whenever its streams are read."""

    def sent(followers: list[Peer]) -> list[bytes]:
        if is_copy:
            part.has_copies, part.state = True, VbState.REPLICA
        found = pumped(followers)
        part.has_copies, part.state = False, VbState.ACTIVE
        return found

    writer, *followers = peers
    part = writer.node.engine.partitions[VB]
    node, found = writer.node, [sent(followers)]
    for kind, key, value in story:
        if kind == "set":
            writer.ask(Opcode.SET, vb_id=VB, key=b"\0" + key, value=value, extras=bytes(8))
        elif kind == "other":
            writer.ask(Opcode.SET, vb_id=VB, key=b"\x08" + key, value=value, extras=bytes(8))
        elif kind == "create":
            name = f"more{node.engine.keyspace.manifest.uid}"
            change_manifest(node, lambda now, name=name: now.create_collection("inventory", name))
        elif kind == "drop" and "hotel" in {
            each.name for each in node.engine.keyspace.manifest.collections.values()
        }:
            change_manifest(node, lambda now: now.drop_collection("inventory", "hotel"))
        elif kind == "delete":
            writer.ask(Opcode.DELETE, vb_id=VB, key=b"\0" + key)
        elif kind == "merge":
            node.merge()
        elif kind == "cut":
            draw(node)
        elif kind == "branch":
            node.commit()
            found.append(sent(followers))
            at = max(0, node.engine.partitions[VB].high_seqno - 1)
            node.engine.keyspace.branch(VB, at)
            node.commit()
            found.append(sent(followers))
            for follower, opaque in zip(followers, OPAQUES, strict=True):
                follower.stream(VB, at, opaque=opaque, flags=StreamFlag.FROM_LATEST)
        elif kind == "commit":
            node.commit()
            found.append(sent(followers))
    node.commit()
    return [*found, sent(followers)]


FILTERS = (b"", b'{"collections": ["0"]}', b'{"scope": "0"}')
MORE_FILTERS = (*FILTERS, b'{"collections": ["8"]}', b'{"collections": ["0", "8"]}')


@settings(max_examples=250, deadline=None)
@given(
    story=steps,
    json=st.booleans(),
    value=st.none() | st.sampled_from(MORE_FILTERS),
    has_ends=st.booleans(),
    has_cuts=st.booleans(),
    is_copy=st.booleans(),
)
def test_both_ways_send_the_same(
    story: list[tuple[str, bytes, bytes]],
    *,
    json: bool,
    value: bytes | None,
    has_ends: bool,
    has_cuts: bool,
    is_copy: bool,
) -> None:
    """`value` None: the clients know no collections."""
    features = [Feature.COLLECTIONS] * (value is not None) + [Feature.JSON] * json
    given: dict[str, Any] = {"has_ends": has_ends, "has_cuts": has_cuts, "value": value or b""}
    in_c = told(story, followed(*features, **given), is_copy=is_copy)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "_live_run", None)
        in_python = told(story, followed(*features, **given), is_copy=is_copy)
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


@pytest.mark.parametrize("is_copy", [False, True])
@pytest.mark.parametrize("value", FILTERS)
def test_a_plain_change_takes_the_short_way(
    monkeypatch: pytest.MonkeyPatch, value: bytes, *, is_copy: bool
) -> None:
    """Also of a client that asked for the default collection, and while a cut is pending."""
    peers = followed(Feature.COLLECTIONS, Feature.JSON, has_ends=True, has_cuts=True, value=value)
    story = [("set", b"a", b"v"), ("commit", b"", b"")]
    told(story, peers)
    monkeypatch.setattr(shell.Producer, "_take_turn", lambda *_: pytest.fail("the long way"))
    story = [("set", b"a", b"v"), ("cut", b"", b""), ("set", b"b", b"after the cut"), story[1]]
    story += [("set", b"b", b"v"), ("commit", b"", b"")]
    found = told(story, peers, is_copy=is_copy)
    assert all(found[-2])
    cut = bytes((0x80, Opcode.DCP_CLOSED_TIME))
    assert all(data.index(cut) < data.index(b"after the cut") for data in found[1])


@pytest.mark.parametrize("lacks", ["vb_uuid", "high_seqno", "incomplete_snapshot"])
def test_a_copy_that_lacks_what_a_stream_has_ends_it(lacks: str) -> None:
    """Its master has cut it back, or fills it anew."""
    peers = followed(Feature.COLLECTIONS, Feature.JSON, has_ends=True)
    told([("set", b"a", b"v"), ("set", b"b", b"v"), ("commit", b"", b"")], peers)
    peers[0].ask(Opcode.SET, vb_id=VB, key=b"\0a", value=b"w", extras=bytes(8))
    peers[0].node.commit()
    part = peers[0].node.engine.partitions[VB]
    part.has_copies, part.state = True, VbState.REPLICA
    part.incomplete_snapshot = SnapshotWindow(2, 9, 0) if lacks == "incomplete_snapshot" else None
    part.vb_uuid += lacks == "vb_uuid"
    part.high_seqno -= 2 * (lacks == "high_seqno")
    (frame,) = peers[1].drain()
    assert frame.opcode == Opcode.DCP_STREAM_END
    assert parse_stream_end(frame) == EndReason.STATE_CHANGED


def test_filters_that_leave_something_out_take_the_long_way() -> None:
    filters = [
        StreamFilter(collections=(0, 8)), StreamFilter(scope_id=0), StreamFilter(),
        StreamFilter(collections=(8,)), StreamFilter(scope_id=8),
        StreamFilter(key_prefixes=(b"a",)), StreamFilter(collections=(8, 9)),
        StreamFilter(collections=(8,), key_prefixes=(b"a",)), StreamFilter(collections=(2,)),
    ]  # fmt: skip
    assert [each.passes for each in filters] == [1, 1, 2, 8, 0, 0, 0, 0, 0]


def test_other_collections_go_the_short_way_to_who_gets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    story = [("other", b"a", b"v"), ("set", b"b", b"w"), ("commit", b"", b"")]
    values = (b"", b'{"collections": ["8"]}', b'{"scope": "8"}')
    for value, is_short in zip(values, (True, True, False), strict=True):
        peers = followed(Feature.COLLECTIONS, Feature.JSON, has_ends=True, value=value)
        told(story, peers)
        turns: list[int] = []
        with monkeypatch.context() as patch:
            take_turn = shell.Producer._take_turn
            patch.setattr(
                shell.Producer, "_take_turn",
                lambda *given, take=take_turn, turns=turns: turns.append(1) or take(*given),
            )  # fmt: skip
            assert all(told(story, peers)[1])
        assert bool(turns) is not is_short


def test_a_collection_whose_id_has_two_bytes_goes_the_short_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The id 137 begins as 9 does."""

    def shown() -> list[list[Opcode]]:
        peers = followed(Feature.COLLECTIONS, Feature.JSON, has_ends=False)
        writer, follower, node = peers[0], peers[1], peers[0].node
        for number in range(9, 138):
            change_manifest(node, lambda now, n=number: now.create_collection("inventory", f"c{n}"))
        node.commit()
        pumped(peers[1:])
        assert follower.stream(0, value=b'{"collections": ["89"]}').status == Status.OK
        follower.drain()
        found = []
        for prefix in (b"\x89\x01", b"\x09", b"\x89\x01", b"\0"):
            writer.ask(Opcode.SET, vb_id=0, key=prefix + b"a", value=b"v", extras=bytes(8))
            node.commit()
            turns.clear()
            found.append([Opcode(frame.opcode) for frame in follower.drain()])
        return found

    turns: list[int] = []
    take_turn = shell.Producer._take_turn
    monkeypatch.setattr(
        shell.Producer, "_take_turn", lambda *given: turns.append(1) or take_turn(*given)
    )
    in_python = [[Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_MUTATION],
                 [Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_SEQNO_ADVANCED]] * 2  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(shell, "_live_run", None)
        assert shown() == in_python
        assert turns
    assert shown() == in_python
    assert not turns
