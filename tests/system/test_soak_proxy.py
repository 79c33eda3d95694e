"""A small part of `scripts/soak proxy`, and that the network it uses really misbehaves."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from clients.consumer.consumer import Consumer
from clients.errors import StreamViolationError
from clients.kv.client import KvClient
from clients.testing import DcpServer
from clients.validator import StreamValidator
from tests.soak.proxy import PARTITIONS, BadNetwork, run_round
from tests.soak.proxy_readers import KINDS, Readers

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def soak_is_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")


async def test_a_consumer_behind_a_bad_network_loses_nothing(tmp_path):
    report = await run_round(tmp_path, seed=1, writes=15_000, events=40_000)
    assert report.events > 40_000
    assert report.passes > len(KINDS)
    assert report.cuts > 3
    # Nearly each cut costs a connection that streamed: but for those in a handshake, and the last.
    assert report.connections > report.cuts // 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_what_the_validator_refuses_ends_a_round(tmp_path, monkeypatch):
    """Runs of mutations pass it, too, and a reader does not go on after an error. Its connections
    through the network may end unclosed then.
    """

    def refuse(self, vb_id, columns, collection_id=0):
        raise StreamViolationError("planted", vb_id=vb_id)

    monkeypatch.setattr(StreamValidator, "observe_run", refuse)
    with pytest.raises(StreamViolationError, match="planted"):
        await run_round(tmp_path, seed=0, writes=2_000, events=40_000)


async def test_each_kind_of_pass_validates_what_it_counts(tmp_path):
    with DcpServer(tmp_path / "data", "--partitions", str(PARTITIONS)) as server:
        async with KvClient.connect(server.address) as kv:
            await kv.set_many({f"key-{n}": b"v" for n in range(2_000)})
        readers = Readers(
            lambda options: Consumer(server.address, validate=True, **options), random.Random(1)
        )
        for kind in KINDS:
            before = readers.events
            validator = (await readers.one_pass(kind.options, may_stop=False)).validator
            assert validator is not None
            found = len(validator.documents())
            assert (found == 2_000) == kind.has_all
            assert readers.events - before >= found > 0
        assert readers.passes == len(KINDS)


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
            cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
        ).stdout  # fmt: skip

    assert "in 1 rounds" in soak(100)
    first = json.loads(state.read_text())["events"]
    assert first >= 100
    assert "in 2 rounds" in soak(first + 1)
    kept = json.loads(state.read_text())
    assert kept["events"] > first
    assert kept["passes"] >= 2 * sum(kind.has_all for kind in KINDS)
