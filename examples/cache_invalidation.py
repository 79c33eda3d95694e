"""A cache in front of the server that drops a value soon after it was changed.

Run it against a server (`dcpd &`), and change documents with `dcpctl set` meanwhile:

    python examples/cache_invalidation.py 127.0.0.1:11210 KEY

It prints the value of KEY once a second, and whether it came from the cache. A consumer follows all
changes from now on and removes changed keys from the cache. If history branches, it removes every
key of the partition, because a cached value may have been undone.
"""

import argparse
import asyncio
import contextlib

from dcpd import Consumer, Deletion, KvClient, Mutation, NotFoundError, Rollback, vbucket_of


class Cache:
    """A cache of values by key. It follows the server's changes to drop what changed."""

    def __init__(self, server: str) -> None:
        self.hits = self.misses = 0
        self._consumer = Consumer(server, start="now")
        self._server = server
        self._values: dict[bytes, bytes] = {}
        self._reading: dict[bytes, object] = {}
        """By key: the reader that may cache its result. A change removes it."""

    async def __aenter__(self) -> "Cache":
        self._kv = await KvClient.open(self._server)
        await self._consumer.open()
        # Once all partitions have answered, "now" is fixed, and no later change is missed.
        while True:
            answered = await self._consumer.high_seqnos()
            if len(answered) == len(self._consumer.followed):
                break
            await asyncio.sleep(0.1)
        self._task = asyncio.create_task(self._invalidate())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self._consumer.close()
        await self._kv.close()

    async def get(self, key: bytes) -> bytes:
        """Return a value. Raises NotFoundError."""
        if self._task.done():
            self._task.result()  # raises: without it nothing is invalidated
        if key in self._values:
            self.hits += 1
            return self._values[key]
        self.misses += 1
        reader = self._reading[key] = object()
        try:
            value = (await self._kv.get(key)).value
            if self._reading.get(key) is reader:  # otherwise it changed while we read
                self._values[key] = value
        finally:
            if self._reading.get(key) is reader:
                del self._reading[key]
        return value

    def _forget(self, key: bytes) -> None:
        self._values.pop(key, None)
        self._reading.pop(key, None)

    async def _invalidate(self) -> None:
        async for change in self._consumer.changes():
            match change:
                case Mutation() | Deletion():
                    self._forget(change.key)
                case Rollback():
                    assert self._consumer.topology is not None, "it is open"
                    count = self._consumer.topology.num_vbuckets
                    for key in self._values.keys() | self._reading.keys():
                        if vbucket_of(key, count) == change.vb_id:
                            self._forget(key)


async def main(server: str, key: str) -> None:
    print(f"connecting to {server}; change the document with: dcpctl set {key} VALUE", flush=True)
    async with Cache(server) as cache:
        print("all partitions are followed from now on; Ctrl-C ends it", flush=True)
        while True:
            hits = cache.hits
            try:
                value = (await cache.get(key.encode())).decode()
            except NotFoundError:
                value = "there is no such document"
            print(value, "(cached)" if cache.hits > hits else "(read)", flush=True)
            await asyncio.sleep(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("server", metavar="HOST:PORT", help="for example 127.0.0.1:11210")
    parser.add_argument("key", metavar="KEY", help="the document to read once a second")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(options.server, options.key))
