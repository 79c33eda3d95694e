"""A consumer, slow at times, behind a network that cuts, delays and splits, while writes, branches,
failovers and compaction continue. Every event is checked, and at the end both sides must have the
same documents.

    server (process) <- writer and troublemaker (process: `python -m tests.soak.proxy_writer`)
        ^
        +- BadNetwork (here) <- Consumer (here)

        +- BadNetwork (here) <- Readers (here): consumers that begin again and again

Each round has its own server. In half of the rounds the consumer has a history stream, which
delivers every seqno, so a gap is noticed at once. In the other rounds a lost change shows in the
documents at the end.

The writer is slow, so its part of the events is small. Most come to the readers, which have all of
them from 0, through the same validator (`tests.soak.proxy_readers`). A round ends when it has had
its number of events.
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
from tests.soak.proxy_readers import KINDS, Readers
from tests.soak.proxy_writer import KEYS

CHUNK_BYTES_MAX = 256 * 1024
SLOW_SHARE = 0.02
SLOW_S = 0.5
"""How often the consumer takes how much time at most for a batch: the server waits for it."""
STALL_S = 5.0
QUIET_TIMEOUT_S = 120.0
"""Time for the consumer to catch up after the last write."""


READERS = 4
"""Passes that go on side by side."""
READER_CUT_BYTES = 8 << 20
"""About how many bytes a reader's connection carries before it is cut."""
PARTITIONS = 64
"""Each pass requests a stream of each."""
CHECK_S = 0.1


class RoundReport(NamedTuple):
    """The result of a round."""

    events: int
    rollbacks: int
    cuts: int
    connections: int
    passes: int = 0


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
        await asyncio.sleep(0)  # transports that were aborted close in the loop's next turn

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function: asyncio would log the cancellation of a coroutine.
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Here, because a task that is cancelled at once runs nothing of its own.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
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
    given = {"vbuckets": range(PARTITIONS), "buffer_bytes": 512 * 1024, **options}
    consumer = Consumer(
        f"127.0.0.1:{network.port}", validate=True, noop_interval_s=1.0, stall_s=STALL_S, **given
    )  # fmt: skip
    # The server's configuration names its own port, so ignore it, and with it the number of its
    # partitions.
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


async def run_round(folder: Path, seed: int, writes: int, events: int = 0) -> RoundReport:
    """Run one round: this many writes at once, then slow ones until there were this many events.
    Raises an error if something is wrong.
    """
    arguments = ("--durability", "interval", "--partitions", str(PARTITIONS))
    with DcpServer(folder / f"round-{seed}", *arguments) as server:
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "soak.proxy_writer", server.address, str(server.admin_port),
            str(seed), str(writes), stdin=subprocess.PIPE,
        )  # fmt: skip
        try:
            return await _round(server, writer, seed, (max(200_000, writes * 2), events))
        finally:
            if writer.returncode is None:
                writer.kill()
            await writer.communicate()


async def _round(
    server: DcpServer, writer: asyncio.subprocess.Process, seed: int, bounds: tuple[int, int]
) -> RoundReport:
    """`bounds`: bytes of the consumer between two cuts, and events of the round."""
    cut_every_bytes, events = bounds
    is_history = bool(seed % 2)
    gaps = Gaps() if is_history else None
    async with (
        BadNetwork(server.port, seed, cut_every_bytes) as network,
        BadNetwork(server.port, seed + 1, READER_CUT_BYTES) as other_network,
        behind(network, history=is_history) as consumer,
        KvClient.connect(server.address) as kv,
    ):
        readers = Readers(lambda options: behind(other_network, **options), random.Random(seed))
        tasks = [asyncio.create_task(_follow(consumer, gaps, random.Random(seed)))]
        tasks += [asyncio.create_task(readers.go_on()) for _ in range(READERS)]
        try:
            while (
                readers.events + consumer.metrics.changes < events or not consumer.metrics.changes
            ):
                _check(tasks, writer)
                await asyncio.sleep(CHECK_S)
            assert writer.stdin is not None
            writer.stdin.close()
            if await writer.wait():
                raise subprocess.CalledProcessError(writer.returncode or 1, "writer")
            await _caught_up(consumer, kv, tasks[0])
            readers.stop()
            await asyncio.gather(*tasks[1:])
            await _compare(consumer, readers, kv)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return RoundReport(
        consumer.metrics.changes + readers.events, consumer.metrics.rollbacks + readers.rollbacks,
        network.cuts + other_network.cuts, consumer.metrics.connections + readers.connections,
        readers.passes,
    )  # fmt: skip


def _check(tasks: list[asyncio.Task[None]], writer: asyncio.subprocess.Process) -> None:
    """Raise what has ended a consumer, or that the writer has ended."""
    for task in tasks:
        if task.done():
            task.result()
            raise AssertionError("a consumer has ended")
    if writer.returncode:
        raise subprocess.CalledProcessError(writer.returncode, "writer")


async def _compare(consumer: Consumer, readers: Readers, kv: KvClient) -> None:
    """Compare the documents of the consumer, and of one more pass of each kind, with the server's.
    Nobody writes.
    """
    documents = await kv.get_many(KEYS)
    held = {key: document.value for key, document in documents.items()}
    finished = [
        await readers.one_pass(kind.options, may_stop=False) for kind in KINDS if kind.has_all
    ]
    for each in (consumer, *finished):
        assert each.validator is not None
        differences = each.validator.compare(held)
        assert not differences, differences[:5]


COUNTED = ("events", "rollbacks", "cuts", "passes")
"""What is added up over all runs with one state file."""


def soak(events_wanted: int, state_path: Path, writes: int, events_per_round: int) -> int:
    """Run rounds until this many events came, over all runs with this state file."""
    state = dict.fromkeys(("seed", *COUNTED), 0)
    if state_path.exists():
        state |= json.loads(state_path.read_text())
    while state["events"] < events_wanted:
        began_s, processor_s = time.monotonic(), time.process_time()
        try:
            with TemporaryDirectory(prefix="dcpd-soak-") as folder:
                events = min(events_per_round, events_wanted - state["events"])
                report = asyncio.run(run_round(Path(folder), state["seed"], writes, events))
        except KeyboardInterrupt:
            print(f"\nstopped in round {state['seed']}; the same command begins it again")
            return 130
        except BaseException:
            print(f"round {state['seed']} failed; replay it with: scripts/soak proxy --round "
                  f"{state['seed']}")  # fmt: skip
            raise
        state["seed"] += 1
        for name in COUNTED:
            state[name] += getattr(report, name)
        state_path.write_text(json.dumps(state))
        rate = report.events / (time.monotonic() - began_s)
        own = report.events / (time.process_time() - processor_s)
        print(
            f"{state['events']:,} of {events_wanted:,} events, {rate:,.0f}/s, {own:,.0f} in a"
            f" second of the consumers' processor, {report}", flush=True,
        )  # fmt: skip
    print(
        f"{state['events']:,} events in {state['seed']:,} rounds, {state['passes']:,} passes from"
        f" 0, {state['rollbacks']:,} rollbacks, {state['cuts']:,} cuts: 0 lost, 0 out of order, 0"
        " twice in a snapshot"
    )
    return 0
