"""STAT `dcp` of a running node: one row of each kind for every connection and stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dcp.server.node import Node
from dcp.server.report.stats import STREAMS_SHOWN_MAX
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.message import StreamRequest, pack_open, pack_stream_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.cluster_here import node_here
from vbucket.model.ids import SEQNO_MAX


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with node_here(tmp_path, {}) as running:
        yield running


async def ask(node: Node, packet: bytes, until_opaque: int) -> list[Frame]:
    """Send requests on a connection that stays open; return the frames up to an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", node.ports.kv)
    writer.write(packet)
    decoder, frames = FrameDecoder(), list[Frame]()
    async with asyncio.timeout(20):
        while not any(f.opaque == until_opaque and not f.key for f in frames):
            frames += decoder.feed(await reader.read(1 << 16))
    KEPT.append(writer)
    return frames


KEPT: list[asyncio.StreamWriter] = []
"""Connections that stay open until the node stops."""


async def stats(node: Node, group: bytes) -> dict[str, str] | int:
    """Return the rows of a group, or the status of its refusal."""
    frames = await ask(node, pack_request(Opcode.STAT, key=group, opaque=99), 99)
    if frames[-1].status:
        return frames[-1].status
    return {f.key.decode(): f.value.decode() for f in frames if f.key}


async def test_each_stream_has_its_rows(node: Node) -> None:
    asked = StreamRequest(0x10, 0, SEQNO_MAX, 0, 0, 0)
    await ask(
        node,
        pack_open(b"watcher", 1)
        + b"".join(pack_stream_request(vb_id, asked, 7) for vb_id in (3, 900))
        + pack_request(Opcode.NOOP, opaque=98),
        98,
    )
    rows = await stats(node, b"dcp")
    assert isinstance(rows, dict)
    assert rows["ep_dcp_streams"] == "2"
    for vb_id in (3, 900):
        prefix = f"eq_dcpq:watcher:stream_{vb_id}_"
        found = {name.removeprefix(prefix): v for name, v in rows.items() if prefix in name}
        uuid = node.engine.partitions[vb_id].vb_uuid
        assert found == {
            "flags": "16", "opaque": "7", "start_seqno": "0", "end_seqno": str(SEQNO_MAX),
            "vb_uuid": str(uuid), "snap_end_seqno": "0", "last_sent_seqno": "0",
            "state": found["state"], "items_remaining": "0",
        }  # fmt: skip
        assert found["state"] in {"backlog", "live"}


async def test_streams_can_be_left_out_and_are_bounded(node: Node) -> None:
    asked = StreamRequest(0, 0, SEQNO_MAX, 0, 0, 0)
    for name in (b"one", b"two"):
        await ask(
            node,
            pack_open(name, 1)
            + b"".join(pack_stream_request(vb_id, asked, 7) for vb_id in range(1024))
            + pack_request(Opcode.NOOP, opaque=98),
            98,
        )
    rows = await stats(node, b"dcp")
    assert isinstance(rows, dict)
    assert rows["ep_dcp_streams"] == "2048"
    assert sum(name.endswith("_opaque") for name in rows) == STREAMS_SHOWN_MAX
    rows = await stats(node, b'dcp {"stream_format":"skip"}')
    assert isinstance(rows, dict)
    assert rows["eq_dcpq:two:num_streams"] == "1024"
    assert not [name for name in rows if ":stream_" in name]
    for wrong in (b"dcp x", b'dcp {"stream_format":"other"}', b'dcp {"no":1}', b"dcp \xff"):
        assert await stats(node, wrong) == Status.KEY_ENOENT


async def test_takeover_statistics_say_what_a_copy_still_takes(node: Node) -> None:
    """Of a partition: live documents and, at most, deletions. Of a stream: what is left to send."""
    keys = [b"k%d" % number for number in range(5)]
    writes = [
        pack_request(Opcode.SET, key=key, extras=bytes(8), value=b"v", vb_id=3) for key in keys
    ]
    gone = pack_request(Opcode.DELETE, key=keys[0], vb_id=3)
    select = pack_request(Opcode.SELECT_BUCKET, key=b"default")
    end = pack_request(Opcode.NOOP, opaque=98)
    await ask(node, b"".join([select, *writes, gone, end]), 98)
    rows = await stats(node, b"dcp-vbtakeover 3")
    assert rows == {
        "vb_items": "4", "on_disk_deletes": "2", "chk_items": "0", "status": "does_not_exist",
        "estimate": "6",
    }  # fmt: skip
    window = pack_request(Opcode.DCP_CONTROL, key=b"connection_buffer_size", value=b"1")
    asked = StreamRequest(0, 0, SEQNO_MAX, 0, 0, 0)
    stream = pack_stream_request(3, asked, 7)
    await ask(node, pack_open(b"slow", 1) + window + stream + end, 98)
    rows = await stats(node, b"dcp-vbtakeover 3 eq_dcpq:slow")
    assert isinstance(rows, dict)
    assert rows["name"] == "eq_dcpq:slow"
    assert rows["status"] == "backfilling"
    assert (rows["estimate"], rows["backfillRemaining"]) == ("6", "6")
    assert await stats(node, b"dcp-vbtakeover 3 nobody") == await stats(node, b"dcp-vbtakeover 3")
    assert await stats(node, b"dcp-vbtakeover 4 slow") == await stats(node, b"dcp-vbtakeover 4")
