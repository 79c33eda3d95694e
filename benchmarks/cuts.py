"""How far the frontier of a consumer is behind, on three nodes, and what cuts cost writers.

    python -m benchmarks.cuts                        0, 300, 1,000 and 3,000 writes a second
    python -m benchmarks.cuts --rates 1000 --seconds 20
    python -m benchmarks.cuts --streamed 100000 --nodes 1

Writers wait for each answer. With `--streamed` one process (`benchmarks.cluster_load`) sends so
many writes a second, whether or not earlier ones are answered. Nodes, writers and consumer share
the machine. The output is one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from benchmarks.cluster_nodes import Load
from benchmarks.peers import cpu_seconds
from clients import Consumer, KvClient
from clients.testing import DcpCluster, DcpServer

WRITERS: Final = 16
SAMPLE_S: Final = 0.01


def figures(samples_s: list[float]) -> dict[str, float]:
    """Return median and p99 in milliseconds."""
    cuts = statistics.quantiles(samples_s, n=100)
    return {"median_ms": round(cuts[49] * 1e3, 1), "p99_ms": round(cuts[98] * 1e3, 1)}


async def write(kv: KvClient, number: int, per_s: float, until_s: float) -> list[float]:
    """Write at a rate; return how long each write took."""
    took: list[float] = []
    due_s = time.monotonic()
    while (due_s := due_s + 1 / per_s) < until_s:
        await asyncio.sleep(due_s - time.monotonic())
        begun_s = time.monotonic()
        await kv.set(f"key{number}-{len(took) % 1000}", b"x" * 200)
        took.append(time.monotonic() - begun_s)
    return took


async def lags(consumer: Consumer, until_s: float) -> list[float]:
    """Return how far the frontier is behind the clock, every SAMPLE_S."""
    found: list[float] = []
    while time.monotonic() < until_s:
        await asyncio.sleep(SAMPLE_S)
        if consumer.frontier:
            found.append((time.time_ns() - consumer.frontier) / 1e9)
    return found


@contextlib.asynccontextmanager
async def following(consumer: Consumer) -> AsyncIterator[None]:
    """Take cuts from a consumer meanwhile, or batches, once it has the first."""
    events: AsyncIterator[object] = consumer.cuts() if consumer.options.cuts else consumer.batches()
    await anext(events)

    async def follow() -> None:
        async for _ in events:
            pass

    task = asyncio.create_task(follow())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run(address: str, rate: int, seconds: float) -> dict[str, Any]:
    """Return the figures of one rate."""
    result: dict[str, Any] = {"writes_per_s": rate}
    for has_cuts in (False, True):
        async with contextlib.AsyncExitStack() as stack:
            kv = await stack.enter_async_context(KvClient.connect(address))
            consumer = await stack.enter_async_context(Consumer(address, cuts=has_cuts))
            await kv.set("first", b"1")
            await stack.enter_async_context(following(consumer))
            until_s = time.monotonic() + seconds
            count = WRITERS if rate else 0
            writers = [write(kv, n, rate / WRITERS, until_s) for n in range(count)]
            looking = asyncio.create_task(lags(consumer, until_s)) if has_cuts else None
            took = [each for some in await asyncio.gather(*writers) for each in some]
            if took:
                result["write with cuts" if has_cuts else "write"] = figures(took)
            if looking is not None:
                result["behind"] = figures(await looking)
    return result


async def run_streamed(servers: list[DcpServer], rate: int, seconds: float) -> dict[str, Any]:
    """Return how far the frontier is behind writes that wait for no answer, and the processor time
    of the servers and of the consumer.
    """
    ports = [server.port for server in servers]
    address = f"127.0.0.1:{ports[0]}"
    load = Load(ports, rate=rate, host="127.0.0.1")
    try:
        load.until_begun()
        async with Consumer(address, cuts=True, start="now") as consumer, following(consumer):
            await asyncio.to_thread(load.split)
            begun_s, used_s = time.monotonic(), time.process_time()
            servers_s = sum(cpu_seconds(server.pid) for server in servers)
            behind = figures(await lags(consumer, begun_s + seconds))
            servers_s = sum(cpu_seconds(server.pid) for server in servers) - servers_s
            used_s = time.process_time() - used_s
            answers = await asyncio.to_thread(load.split)
            took_s = time.monotonic() - begun_s
    finally:
        load.kill()
    return {
        "writes_per_s": rate, "answered_per_s": round(answers["operations"] / took_s),
        "answer_p99_ms": answers["p99_us"] / 1e3, "behind": behind,
        "cores": {"servers": round(servers_s / seconds, 2), "consumer": round(used_s / seconds, 2)},
    }  # fmt: skip


def measure_streamed(nodes: int, rate: int, seconds: float) -> dict[str, Any]:
    """Measure on one node, or on a cluster of three."""
    with DcpServer() if nodes == 1 else DcpCluster() as server:
        servers = [server] if isinstance(server, DcpServer) else list(server.nodes.values())
        return asyncio.run(run_streamed(servers, rate, seconds))


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="0,300,1000,3000")
    parser.add_argument("--streamed", type=int, metavar="RATE")
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=3, help="with --streamed")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    if given.streamed is not None:
        print(json.dumps(measure_streamed(given.nodes, given.streamed, given.seconds), indent=2))
        return
    with DcpCluster() as cluster:
        rates = [int(rate) for rate in given.rates.split(",")]
        print(
            json.dumps(
                [asyncio.run(run(cluster.address, rate, given.seconds)) for rate in rates], indent=2
            )
        )


if __name__ == "__main__":
    main()
