"""A member that starts on a full disk tells where the partitions are, and comes back by itself."""

from __future__ import annotations

import json
from pathlib import Path

from clients.kv.client import KvClient
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.cluster_here import Client, ClusterHere
from support.forgetful_disk import fill, small_disk
from support.waiting import until_so
from vbucket.engine.partition import VbState


async def test_a_member_starts_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk("48M") as disk:
        (disk / "n2").mkdir()
        (tmp_path / "n2").symlink_to(disk / "n2")
        async with ClusterHere(tmp_path, map_size_bytes=64 << 20) as cluster:
            await cluster.start("n1")
            await cluster.become_member("n1", copies=2)
            await cluster.start("n2")
            await cluster.become_member("n2")
            await cluster.until_all_in_sync(2)
            async with cluster.client("n1") as kv:
                await kv.set(b"k", b"v")
            await cluster.kill("n2")
            filler = fill(disk)
            node = await cluster.start("n2")
            assert "No space left" in node.health.read_only_why
            replicated = node.replicated
            assert replicated is not None
            await until_so(lambda: replicated.session.view.is_loaded)
            await until_so(lambda: node._config.config_version() > (1, 1))
            assert not replicated.session.membership.has_registered
            assert {part.state for part in node.engine.partitions} == {VbState.REPLICA}
            async with Client.connect(node) as client:
                await client.ask(pack_request(Opcode.SELECT_BUCKET, key=b"default"))
                frame = await client.ask(pack_request(Opcode.GET, vb_id=1, key=b"k"))
                assert frame.status == Status.NOT_MY_VBUCKET
                assert json.loads(frame.value)["rev"] > 1
            problems = "\n".join(
                f"{each.what}. {each.try_}" for each in node._cluster_operations().status().problems
            )
            assert "No space left" in problems
            assert "takes no part" in problems
            filler.unlink()
            await cluster.until_all_in_sync(2)
            async with cluster.client("n2") as kv:
                await check_value(kv)


async def check_value(kv: KvClient) -> None:
    assert (await kv.get(b"k")).value == b"v"
