"""A consumer, slow at times, behind a network that cuts, delays and splits, while writes, branches,
failovers and compaction continue. Every event is checked, and at the end both sides must have the
same documents.

    server (process) <- writer and troublemaker (process: `python -m tests.soak.proxy_writer`)
        ^
        +- BadNetwork (here) <- Consumer (here)

Each round has its own server. Half of the rounds use history streams, which deliver every seqno, so
a gap is noticed at once. In the other rounds a lost change shows in the documents at the end.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from clients.consumer.consumer import Consumer
from clients.event import Deletion, Event, Mutation, Rollback, StreamOpened
from clients.kv.client import KvClient
from clients.testing import DcpServer
from tests.soak.proxy_writer import KEYS

CHUNK_BYTES_MAX = 256 * 1024
SLOW_SHARE = 0.02
SLOW_S = 0.5
"""How often the consumer takes how much time at most for a batch: the server waits for it."""
STALL_S = 5.0
QUIET_TIMEOUT_S = 120.0
"""Time for the consumer to catch up after the last write."""


class RoundReport(NamedTuple):
    """The result of a round."""

    events: int
    rollbacks: int
    cuts: int
    connections: int


class BadNetwork:
    """A TCP proxy on loopback that misbehaves by a seed; it cuts about every `cut_every_bytes`."""

    def __init__(self, port: int, seed: int, cut_every_bytes: int) -> None:
        self.cuts = 0
        self.port = 0
        self._to_port = port
        self._random = random.Random(seed)
        self._cut_every_bytes = cut_every_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> BadNetwork:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function: asyncio would log the cancellation of a coroutine.
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        left = int(self._random.expovariate(1 / self._cut_every_bytes))
        pumps = [
            asyncio.create_task(self._pump(reader, inner_writer, left)),
            asyncio.create_task(self._pump(inner_reader, writer, left)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            writer.transport.abort()
            inner_writer.transport.abort()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: int
    ) -> None:
        draw = self._random
        try:
            while data := await reader.read(CHUNK_BYTES_MAX):
                if draw.random() < 0.02:
                    await asyncio.sleep(draw.random() * 0.03)
                if draw.random() < 0.2:
                    # A part first, and the rest when the other side has seen that part.
                    at = draw.randrange(len(data))
                    writer.write(data[:at])
                    await writer.drain()
                    await asyncio.sleep(0)
                    data = data[at:]
                left -= len(data)
                if left < 0:
                    self.cuts += 1
                    writer.write(data[: draw.randrange(len(data) + 1)])
                    return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return


class Gaps:
    """Checks that a history stream skips no seqno."""

    def __init__(self) -> None:
        self._seqnos: dict[int, int] = {}

    def observe(self, event: Event) -> None:
        match event:
            case StreamOpened():
                expected = self._seqnos.get(event.vb_id, 0)
                assert event.start_seqno == expected, f"opened at {event}, held {expected}"
            case Mutation() | Deletion():
                expected = self._seqnos.get(event.vb_id, 0) + 1
                assert event.seqno == expected, f"{event} where seqno {expected} is due"
                self._seqnos[event.vb_id] = event.seqno
            case Rollback():
                self._seqnos[event.vb_id] = event.to_seqno


def behind(network: BadNetwork, **options: object) -> Consumer:
    """Return a consumer that reaches the server only through the network."""
    consumer = Consumer(
        f"127.0.0.1:{network.port}", validate=True, noop_interval_s=1.0, stall_s=STALL_S,
        buffer_bytes=512 * 1024, **options,
    )  # fmt: skip
    # The server's configuration names its own port, so ignore it.
    consumer._placement.adopt = lambda *_config, **_named: setattr(  # type: ignore[method-assign]
        consumer._placement.cluster, "topology", None
    )
    return consumer


async def _follow(consumer: Consumer, gaps: Gaps | None, draw: random.Random) -> None:
    async for events in consumer.batches():
        if draw.random() < SLOW_SHARE:
            await asyncio.sleep(draw.random() * SLOW_S)
        if gaps is not None:
            for event in events:
                gaps.observe(event)


async def _caught_up(consumer: Consumer, kv: KvClient, task: asyncio.Task[None]) -> None:
    high = {vb: seqno for vb, seqno in (await kv.get_all_vb_seqnos()).items() if seqno}
    async with asyncio.timeout(QUIET_TIMEOUT_S):
        while True:
            if task.done():
                task.result()
            done = consumer.checkpoint()
            if all(vb in done and done[vb].seqno == seqno for vb, seqno in high.items()):
                return
            await asyncio.sleep(0.02)


async def run_round(folder: Path, seed: int, writes: int) -> RoundReport:
    """Run one round. Raises an error if something is wrong."""
    with DcpServer(folder / f"round-{seed}", "--durability", "interval") as server:
        is_history = bool(seed % 2)
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "soak.proxy_writer", server.address, str(server.admin_port),
            str(seed), str(writes),
        )  # fmt: skip
        try:
            async with BadNetwork(server.port, seed, max(200_000, writes * 2)) as network:
                consumer = behind(network, history=is_history)
                gaps = Gaps() if is_history else None
                async with consumer, KvClient.connect(server.address) as kv:
                    task = asyncio.create_task(_follow(consumer, gaps, random.Random(seed)))
                    try:
                        if await writer.wait():
                            raise subprocess.CalledProcessError(writer.returncode or 1, "writer")
                        await _caught_up(consumer, kv, task)
                    finally:
                        task.cancel()
                        await asyncio.gather(task, return_exceptions=True)
                    documents = await kv.get_many(KEYS)
        finally:
            if writer.returncode is None:
                writer.kill()
                await writer.wait()
        assert consumer.validator is not None
        held = {key: document.value for key, document in documents.items()}
        differences = consumer.validator.compare(held)
        assert not differences, differences[:5]
        return RoundReport(
            consumer.metrics.changes, consumer.metrics.rollbacks, network.cuts,
            consumer.metrics.connections,
        )  # fmt: skip


def soak(events_wanted: int, state_path: Path, writes_per_round: int) -> int:
    """Run rounds until this many events came, over all runs with this state file."""
    state = json.loads(state_path.read_text()) if state_path.exists() else {}
    events, seed, rollbacks, cuts = (
        state.get(name, 0) for name in ("events", "seed", "rollbacks", "cuts")
    )
    while events < events_wanted:
        began = time.monotonic()
        try:
            with TemporaryDirectory(prefix="dcpd-soak-") as folder:
                report = asyncio.run(run_round(Path(folder), seed, writes_per_round))
        except BaseException:
            print(f"round {seed} failed; replay it with: scripts/soak proxy --round {seed}")
            raise
        events, seed = events + report.events, seed + 1
        rollbacks, cuts = rollbacks + report.rollbacks, cuts + report.cuts
        state_path.write_text(
            json.dumps({"events": events, "seed": seed, "rollbacks": rollbacks, "cuts": cuts})
        )
        rate = report.events / (time.monotonic() - began)
        print(f"{events:,} of {events_wanted:,} events, {rate:,.0f}/s, {report}", flush=True)
    print(
        f"{events:,} events in {seed:,} rounds, {rollbacks:,} rollbacks, {cuts:,} cuts: 0 lost,"
        " 0 out of order, 0 twice in a snapshot"
    )
    return 0
