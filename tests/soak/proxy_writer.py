"""python -m tests.soak.proxy_writer ADDRESS ADMIN_PORT SEED WRITES: writes, branches, failovers,
compaction, purges. So many writes come at once; slow ones follow until the standard input ends."""

from __future__ import annotations

import asyncio
import random
import sys

from clients.errors import DcpdError, NotFoundError
from clients.kv.client import KvClient
from clients.testing import DcpServer, ServerRefusedError

KEYS = [f"key-{n}" for n in range(100_000)]
REST_S = 0.25
"""Between two chunks of slow writes."""
CHUNK = 1000
COMPACTED = 16
"""Partitions that are compacted at once."""
TROUBLE_EVERY = 2
"""Chunks of writes between two interventions."""


async def write(address: str, admin_port: int, seed: int, writes: int) -> None:
    draw = random.Random(seed)
    server = DcpServer("unused")
    server.admin_port = admin_port
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    async with KvClient.connect(address, timeout_s=60.0) as kv:
        number = 0
        while number < writes or not ended.done():
            if number >= writes:
                await asyncio.wait({ended}, timeout=REST_S)
            count = min(CHUNK, writes - number) if number < writes else CHUNK
            async with kv.pipeline() as batch:
                for n in range(number, number + count):
                    key = draw.choice(KEYS)
                    if draw.random() < 0.05:
                        batch.delete(key)
                    else:
                        batch.set(key, b"%d" % n + bytes(draw.randrange(60)))
            for result in batch.results:
                if isinstance(result, DcpdError) and not isinstance(result, NotFoundError):
                    raise result
            if number // CHUNK % TROUBLE_EVERY == TROUBLE_EVERY - 1:
                await trouble(server, kv, draw, is_history=bool(seed % 2))
            number += count


async def trouble(
    server: DcpServer, kv: KvClient, draw: random.Random, *, is_history: bool
) -> None:
    """Branch a partition's history, fail over, compact, purge, or end streams. Where a consumer
    needs every version, compaction drops none, and nothing is purged.
    """
    high = await kv.get_all_vb_seqnos()
    vb_id = draw.choice([vb for vb, seqno in high.items() if seqno] or [0])
    lost = min(high[vb_id], draw.choice([0, 1, 3, 20]))
    what = draw.randrange(5 if is_history else 6)
    try:
        if what == 0:
            await asyncio.to_thread(server.branch, vb_id, high[vb_id] - lost)
        elif what == 1:
            await asyncio.to_thread(server.failover, vb_id, lose=lost)
        elif what == 2:
            reason = draw.choice(["disconnected", "too_slow", "backfill_failed", "closed"])
            await asyncio.to_thread(server.close_streams, reason=reason, vb=vb_id)
        elif what == 3:
            kept = None if is_history else "0s"
            chosen = draw.sample(sorted(high), COMPACTED)
            await asyncio.to_thread(server.compact, chosen, history=kept)
        elif what == 4:
            await asyncio.to_thread(server.drop_connections, vb=vb_id)
        else:
            await asyncio.to_thread(server.purge, vb_id, high[vb_id] // 2)
    except (ServerRefusedError, TimeoutError):
        # The consumer is reconnecting, so there is no stream to end; or a compaction goes on.
        return


if __name__ == "__main__":
    asyncio.run(write(sys.argv[1], *map(int, sys.argv[2:])))
