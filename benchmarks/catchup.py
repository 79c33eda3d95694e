"""A Python consumer in its own process that catches up with all changes.

    python -m benchmarks.catchup redis --port 6379 --changes 500000

Both sides do the minimum that a consumer does: they keep the newest value of each key. redis-py
parses with hiredis, which is installed beside it. "events" is dcpd with an event object for each
change in batches, "each" with `async for`. The output is one JSON document: changes, distinct keys,
and seconds since the start, imports included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from vbucket.model.ids import NUM_VBUCKETS

Follow = Callable[[int, int, dict[bytes, bytes]], Coroutine[Any, Any, None]]
XREAD_COUNT: Final = 16
"""Entries of each stream per XREAD. Of 16 to 1,024 it was the fastest, by a fifth at most."""


def follow_redis(port: int, changes: int, state: dict[bytes, bytes]) -> None:
    """Read the streams of all partitions until this many changes were seen."""
    import hiredis  # noqa: F401 - redis-py would use its slower parser without it
    import redis

    seen = 0
    client = redis.Redis(port=port, socket_timeout=60)
    positions: dict[Any, Any] = {b"stream:%d" % vb_id: b"0" for vb_id in range(NUM_VBUCKETS)}
    while seen < changes:
        reply: Any = client.xread(positions, count=XREAD_COUNT)
        if not reply:
            break
        for name, entries in reply:
            for _, fields in entries:
                state.update(fields)
            positions[name] = entries[-1][0]
            seen += len(entries)
    client.close()
    check(seen, changes)


async def follow_nats(port: int, changes: int, state: dict[bytes, bytes]) -> None:
    """Read the bucket's stream with an ordered consumer, as a watcher of all keys does."""
    import nats as client

    from benchmarks.nats import BUCKET

    seen = 0
    connection = await client.connect(f"nats://127.0.0.1:{port}")
    subscription = await connection.jetstream().subscribe(
        f"$KV.{BUCKET}.>", ordered_consumer=True, pending_msgs_limit=1 << 30,
        pending_bytes_limit=1 << 40,
    )  # fmt: skip
    async for message in subscription.messages:
        state[message.subject] = message.data
        seen += 1
        if seen == changes:
            break
    await connection.close()


def check(seen: int, changes: int) -> None:
    """End the process if other changes came than were written."""
    if seen != changes:
        raise SystemExit(f"catchup: {seen} changes came, {changes} were expected")


async def follow_batches(port: int, changes: int, state: dict[bytes, bytes], *, lazy: bool) -> None:
    """Follow all partitions with our consumer to their end, in batches. With `lazy`, mutations come
    as columns.
    """
    from clients import Consumer, Deletion, Mutation, Mutations

    seen = 0
    async with Consumer(f"127.0.0.1:{port}", until_now=True) as consumer:
        async for items in consumer.lazy_batches() if lazy else consumer.batches():
            for item in items:
                if isinstance(item, Mutation):
                    state[item.key] = item.value
                    seen += 1
                elif isinstance(item, Mutations):
                    state.update(item.items())
                    seen += len(item)
                elif isinstance(item, Deletion):
                    del state[item.key]
                    seen += 1
    check(seen, changes)


async def follow_each(port: int, changes: int, state: dict[bytes, bytes]) -> None:
    """The same, as users write it first."""
    from clients import Consumer, Deletion, Mutation

    seen = 0
    async with Consumer(f"127.0.0.1:{port}", until_now=True) as consumer:
        async for event in consumer:
            if isinstance(event, Mutation):
                state[event.key] = event.value
                seen += 1
            elif isinstance(event, Deletion):
                del state[event.key]
                seen += 1
    check(seen, changes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.catchup")
    parser.add_argument("peer", choices=["dcpd", "events", "each", "redis", "nats"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--changes", type=int, required=True)
    options = parser.parse_args()
    began = time.perf_counter()
    # Not the result of the coroutine: asyncio.run would sort it, for a text that nobody sees.
    state: dict[bytes, bytes] = {}
    if options.peer == "redis":
        follow_redis(options.port, options.changes, state)
    else:
        follows: dict[str, Follow] = {
            "dcpd": partial(follow_batches, lazy=True),
            "events": partial(follow_batches, lazy=False),
            "each": follow_each, "nats": follow_nats,
        }  # fmt: skip
        asyncio.run(follows[options.peer](options.port, options.changes, state))
    seconds = time.perf_counter() - began
    print(json.dumps({"changes": options.changes, "keys": len(state), "seconds": seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
