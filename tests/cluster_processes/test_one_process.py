"""One data folder, one member, one process: what happens to a second one, with real processes."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from clients.kv.client import KvClient
from clients.testing import DcpServer
from dcp.server.main import ExitCode
from support.server import ClusterProcesses

pytestmark = pytest.mark.crash


async def test_copied_folder_is_refused_and_killed_one_is_back_at_once(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, "ab", "--lease", "2s") as cluster:
        in_thread, nodes = cluster.in_thread, cluster.nodes
        await in_thread(cluster.until_in_sync, 2)
        async with KvClient.connect(nodes["a"].address, timeout_s=20) as kv:
            await kv.set(b"k", b"v")
            nodes["b"].kill()
            shutil.copytree(tmp_path / "b", tmp_path / "copy")
            await in_thread(nodes["b"].start)  # the lease of the killed process lives
            await in_thread(cluster.until_in_sync, 2)
            copy = DcpServer(tmp_path / "copy", "--lease", "2s")
            await in_thread(copy.start)
            assert copy._process is not None
            code = await in_thread(copy._process.wait, 120)
            said = copy.log_path.read_text()
            copy.kill()
            assert code == ExitCode.FAILED, said
            assert "another process runs as node b at" in said
            assert "with a copy of this data folder" in said
            assert "Stop one of the two" in said
            # The first process was not disturbed.
            assert nodes["b"]._process is not None
            assert nodes["b"]._process.poll() is None
            status = await asyncio.to_thread(cluster.status)
            assert {node["name"]: node["is_alive"] for node in status["nodes"]} == {
                "a": True,
                "b": True,
            }
            assert (await kv.get(b"k")).value == b"v"
