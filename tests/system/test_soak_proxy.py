"""A small part of `scripts/soak proxy`, and that the network it uses really misbehaves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.proxy import BadNetwork, run_round

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def soak_is_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")


async def test_a_consumer_behind_a_bad_network_loses_nothing(tmp_path):
    report = await run_round(tmp_path, seed=1, writes=15_000)
    assert report.events > 13_000
    assert report.cuts > 3
    # Nearly each cut costs a connection that streamed: but for those in a handshake, and the last.
    assert report.connections > report.cuts // 2


async def test_the_network_cuts_in_the_middle_of_what_it_carries():
    async def serve(reader, writer):
        writer.write(bytes(1_000_000))
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with BadNetwork(port, seed=3, cut_every_bytes=100_000) as network:
        reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
        try:
            got = len(await reader.read(-1))
        except ConnectionResetError:
            got = -1
        writer.close()
    server.close()
    await server.wait_closed()
    assert network.cuts == 1
    assert got < 1_000_000


def test_the_command_goes_on_where_it_was(tmp_path):
    state = tmp_path / "state.json"

    def soak(events):
        return subprocess.run(
            [
                sys.executable, "-m", "tests.soak", "proxy", "--events", str(events),
                "--writes", "300", "--state", str(state),
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=50, check=True,
        ).stdout  # fmt: skip

    assert "in 1 rounds" in soak(100)
    assert "in 2 rounds" in soak(500)
