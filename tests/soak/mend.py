"""Damages one copy's store while a cluster of two nodes in this process is under load, and looks
what becomes of it: `scripts/soak mend`.

    damage a live page of one node ── its scrubber reads everything ──> mended, named, or of no use

What must hold: no answer is wrong; a key is refused only while damage waits to be mended or is
named; what the docs say is mended is mended (docs/scrubbing.md); both copies are equal at the end,
and `dcpctl verify` finds nothing. A page that can only be named gets its bytes back, as from a copy
of the file, and the run goes on.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from clients.errors import DcpdError
from clients.kv.client import KvClient
from dcp.server.node import Node
from support.cluster_here import ClusterHere
from support.stored_bytes import PAGE_BYTES, layout_of
from support.waiting import until_so
from vbucket.upkeep.retention import Windows

PARTITIONS: Final = 64
KEYS: Final = 1_500
VALUE_BYTES: Final = 900
FAULTS: Final = ("flip", "zero", "sector", "misdirected", "stale")
TREES: Final = {
    "keys branch", "versions branch", "state branch", "failover branch", "versions leaf",
    "state leaf", "failover leaf",
}  # fmt: skip
MENDED_ALWAYS: Final = {"keys leaf", "versions block"}
"""Where everything, as in TREES, is mended, whatever the fault is."""
MENDED_S: Final = 60
"""Within this time: a copy that does not answer is asked again after some seconds."""


class Hit(NamedTuple):
    """One damage."""

    fault: str
    place: str
    page: int
    before: bytes


class Tally(NamedTuple):
    """What became of the damages."""

    results: Counter[tuple[str, str, str]]
    """By fault, place and what became of it."""
    longest_s: float
    """Until the slowest of those was mended that were."""
    reads: int
    refused: int
    wrong: int
    findings: str
    """What `dcpctl verify` says about the damaged node at the end; "": nothing is wrong."""

    def mistakes(self) -> list[str]:
        """Return what does not hold."""
        found = [
            f"{count} times {fault} of {place}: {result}"
            for (fault, place, result), count in self.results.items()
            if result == "named" and place in MENDED_ALWAYS | TREES
        ]
        if self.wrong:
            found.append(f"{self.wrong} wrong answers")
        return found + ([self.findings] if self.findings != repr("") else [])

    def table(self) -> str:
        """Return the results as lines of a table."""
        lines = ["fault        place            mended  named  no effect"]
        for fault in FAULTS:
            for place in sorted({key[1] for key in self.results if key[0] == fault}):
                counts = [self.results[fault, place, each] for each in ("mended", "named", "none")]
                lines.append(
                    f"{fault:<12} {place:<16} {counts[0]:>6} {counts[1]:>6} {counts[2]:>10}"
                )
        lines.append(
            f"{self.reads:,} reads under load: {self.refused} refused meanwhile, {self.wrong} "
            f"wrong; mended within {self.longest_s:.1f} s"
        )
        return "\n".join(lines)


def value_of(key: int, version: int) -> bytes:
    return random.Random(key * 1_000_003 + version).randbytes(VALUE_BYTES)


class Load:
    """Writes and reads of one client, and what each key holds."""

    def __init__(
        self,
        kv: KvClient,
        seed: int,
        keys: int = KEYS,
        values: Callable[[int, int], bytes] = value_of,
    ) -> None:
        """`values` makes the value of a key's version."""
        self._kv = kv
        self._draw = random.Random(seed)
        self._values = values
        self.versions = dict.fromkeys(range(keys), 0)
        self.unsure: set[int] = set()
        """Keys whose last write was refused or not answered."""
        self.reads = self.refused = self.wrong = 0

    async def run(self) -> None:
        """Read and write until cancelled."""
        while True:
            await self.read(self._draw.randrange(len(self.versions)))
            if self._draw.random() < 0.2:
                await self.write(self._draw.randrange(len(self.versions)))
            await asyncio.sleep(0.002)

    async def write(self, key: int) -> None:
        """Write the next version of a key."""
        version = self.versions[key] + 1
        self.unsure.add(key)  # until it is answered, also if the run ends before that
        with suppress(DcpdError):
            await self._kv.set(b"key %d" % key, self._values(key, version))
            self.versions[key] = version
            self.unsure.discard(key)

    async def read(self, key: int) -> bool:
        """Read a key and compare; return whether it was answered."""
        expected, is_unsure = self.versions[key], key in self.unsure
        try:
            value = (await self._kv.get(b"key %d" % key)).value
        except DcpdError:
            self.refused += 1
            return False
        self.reads += 1
        may_be = {expected, expected + 1} if is_unsure or key in self.unsure else {expected}
        self.wrong += value not in {self._values(key, version) for version in may_be}
        return True


class Damager:
    """Damages live pages of one node's store."""

    def __init__(self, store: Path, seed: int) -> None:
        self._store = store
        self._path = store / "data.mdb"
        self._draw = random.Random(seed)
        self._older = self._path.read_bytes()

    def hit(self) -> Hit | None:
        """Damage a page; None: there is none for this fault now."""
        layout, data = layout_of(self._store), self._path.read_bytes()
        pages: dict[str, list[int]] = {}
        for table, name in (("by_key", "keys"), ("by_seqno", "versions"), ("state", "state"),
                            ("failover", "failover")):  # fmt: skip
            pages[f"{name} leaf"] = sorted(layout[table].leaves)
            pages[f"{name} branch"] = sorted(layout[table].branches)
        pages["versions block"] = sorted(layout["by_seqno"].large)
        place = self._draw.choice(
            [name for name in pages if pages[name]] + ["versions block", "keys leaf"]
        )
        page, fault = self._draw.choice(pages[place]), self._draw.choice(FAULTS)
        start = page * PAGE_BYTES
        if place == "versions block" and fault != "stale":
            own_pages = int.from_bytes(data[start + 12 : start + 16], "little")
            start += PAGE_BYTES * self._draw.randrange(min(2, own_pages))
        before = data[start : start + PAGE_BYTES]
        after = bytearray(before)
        if fault == "flip":
            after[self._draw.randrange(PAGE_BYTES)] ^= 1 << self._draw.randrange(8)
        elif fault == "zero":
            after[:] = bytes(PAGE_BYTES)
        elif fault == "sector":
            at = 512 * self._draw.randrange(8)
            after[at : at + 512] = self._draw.randbytes(512)
        elif fault == "misdirected":
            other = self._draw.choice(pages[self._draw.choice([n for n in pages if pages[n]])])
            after[:] = data[other * PAGE_BYTES : (other + 1) * PAGE_BYTES]
        else:
            after[:] = self._older[start : start + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
        if after == before:
            return None
        self._put(start, bytes(after))
        return Hit(fault, place, start // PAGE_BYTES, before)

    def put_back(self, hit: Hit) -> None:
        """Give a page back what it held."""
        self._put(hit.page * PAGE_BYTES, hit.before)

    def _put(self, at: int, data: bytes) -> None:
        with self._path.open("r+b") as file:
            file.seek(at)
            file.write(data)


async def merged(node: Node) -> None:
    await node.write.compaction.compact(range(PARTITIONS), Windows(10**18, 1 << 40, 10**18))


async def one(node: Node, damager: Damager) -> tuple[Hit, str, float] | None:
    """Damage a page, and return what became of it and after how long."""
    scrubbing = node.write.scrubbing
    hit = damager.hit()
    if hit is None:
        return None
    status = scrubbing.status
    mended, passes, began_s = status.mended, status.passes, time.monotonic()
    scrubbing.start()
    await until_so(lambda: status.passes > passes)
    with suppress(TimeoutError):  # blocks come from the other copy a moment later
        async with asyncio.timeout(MENDED_S if hit.place in MENDED_ALWAYS | TREES else 1):
            await until_so(lambda: not status.damages)
    took_s = time.monotonic() - began_s
    if status.damages:
        damager.put_back(hit)
        passes = status.passes
        scrubbing.start()
        await until_so(lambda: status.passes > passes)
        return hit, "named", took_s
    return hit, "mended" if status.mended > mended else "none", took_s


async def soak(folder: Path, *, damages: int, seed: int) -> Tally:
    """Make so many damages, one after the other, under load."""
    results: Counter[tuple[str, str, str]] = Counter()
    longest_s = 0.0
    async with ClusterHere(folder, partitions=PARTITIONS, item_cache_bytes=0) as cluster:
        for name, copies in (("n1", 2), ("n2", 0)):
            await cluster.start(name)
            await cluster.become_member(name, copies=copies)
        await cluster.until_all_in_sync(2)
        node = cluster.nodes["n1"]
        async with cluster.client("n2", timeout_s=5.0) as kv:
            load = Load(kv, seed)
            await asyncio.gather(*(load.write(key) for key in range(KEYS)))
            for each in cluster.nodes.values():
                await merged(each)
            damager = Damager(folder / "n1" / "store", seed)
            for key in range(0, KEYS, 3):  # so that older pages differ
                await load.write(key)
            for each in cluster.nodes.values():
                await merged(each)
            running = asyncio.ensure_future(load.run())
            for _ in range(damages):
                became = await one(node, damager)
                if became is not None:
                    hit, result, took_s = became
                    results[hit.fault, hit.place, result] += 1
                    longest_s = max(longest_s, took_s if result == "mended" else 0.0)
            running.cancel()
            await asyncio.wait([running])
            for key in range(KEYS):
                assert await load.read(key), f"key {key} is refused, and nothing is damaged"
        await until_so(lambda: equal(*cluster.nodes.values()))
    verify = [sys.executable, "-m", "clients.cli", "verify", str(folder / "n1"), "-o", "json"]
    verified = await asyncio.to_thread(
        subprocess.run, verify, capture_output=True, text=True, check=False
    )
    documents = [json.loads(line) for line in verified.stdout.splitlines()]
    # The store of this process has no kind that cluster.json could name.
    found = [each for each in documents if each.get("where", "cluster.json") != "cluster.json"]
    return Tally(results, longest_s, load.reads, load.refused, load.wrong, repr(found or ""))


def equal(one: Node, other: Node) -> bool:
    """Whether two copies have the same versions in all partitions."""
    for mine, theirs in zip(one.engine.partitions, other.engine.partitions, strict=True):
        if mine.high_seqno != theirs.high_seqno:
            return False
        for part, node in ((mine, one), (theirs, other)):
            assert part.committed_seqno == part.high_seqno, (part.vb_id, node.about.data_dir)
        versions = [
            node.engine.versions.entries(part, 1, part.high_seqno, 1 << 30)
            for part, node in ((mine, one), (theirs, other))
        ]
        if versions[0] != versions[1]:
            return False
    return True


def run(folder: Path, *, damages: int, seed: int) -> int:
    """Run it and print the table; return the exit code."""
    tally = asyncio.run(soak(folder, damages=damages, seed=seed))
    print(tally.table())
    for mistake in tally.mistakes():
        print(f"WRONG: {mistake}")
    return 1 if tally.mistakes() else 0
