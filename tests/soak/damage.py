"""Damages files of one node of a cluster of three processes under load, one after the other, and
looks what becomes of each: `scripts/soak damage`.

    a file of n2 is damaged ── its scrubber reads everything, or it is started again ──> repaired,
    named, or of no use to anybody ── what was only named gets its bytes back ──> the next one

A client reads and writes all the time, through all nodes. What must hold: no answer is wrong; what
is damaged is repaired or named within a minute; a client is refused for longer than 2 s only while
something is named; after each damage all keys can be read; at the end, also when Ctrl-C or SIGTERM
ends it, the copies are equal and `dcpctl verify` finds nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final, NamedTuple

from clients.kv.client import KvClient
from clients.testing.cluster import DcpCluster
from clients.testing.process import ServerRefusedError, ServerStartError
from dcp.server.files.kept_twice import KEPT_NAMES, twin_of
from dcp.server.storage.folder import MARKER_NAME, store_path
from support.stored_bytes import PAGE_BYTES, layout_of
from tests.soak import mend
from vbucket.store.lmdb.environment_lmdb import LmdbPageReader
from vbucket.store.records import BY_KEY_TABLE
from vbucket.store.records import TABLES as TABLES_OF_STORE

PARTITIONS: Final = 64
KEYS: Final = 3_000
BATCH: Final = 250
"""Keys that are written at the same time at the beginning."""
ERROR_S: Final = 2.0
"""Errors of a client may take so long."""
NAMED_S: Final = 12.0
"""What is not mended after so long is taken to be named only: other copies are asked every 10 s."""
MENDED_S: Final = 60.0
FAULTS: Final = ("bit", "bits", "zeros", "sector", "misdirected", "stale")
RESULTS: Final = ("repaired", "named", "no effect", "wrong", "error > 2 s", "not in 60 s")
TABLES: Final = {"by_key": "keys", "by_seqno": "versions", "state": "state",
                 "failover": "failover", "meta": "meta"}  # fmt: skip
STOPPED: Final = "stopped, "
"""Places that were damaged while the process was down."""
STOPPED_SHARE: Final = 0.2
RESTARTED: Final = "restarted, "
"""Places in files that are read at a start only."""
STARTS: Final = 5
"""Attempts of a sound node: a machine that has other work is slow."""


class Jepsen(NamedTuple):
    """A fault of https://jepsen.io/analyses/nats-2.12.1 (2025), and what it is here."""

    fault: str
    nats: str
    faults: tuple[str, ...]
    """Of this soak; empty: another one does it."""
    places: str
    """A part of their names."""
    other: str


JEPSEN: Final = (
    Jepsen("flipped bits in data files of a minority", "lost up to half of the answered writes",
           ("bit", "bits"), "", ""),
    Jepsen("flipped bits in snapshots of a minority", "deleted the stream, no quorum any more",
           ("bit", "bits"), "restarted", ""),
    Jepsen("files of a minority cut short", "lost answered writes", ("cut",), "", ""),
    Jepsen("power cut of all nodes", "lost some 30 s of answered writes (synced every 2 minutes)",
           (), "", "none lost: synced before the answer; scripts/soak power, kill"),
    Jepsen("crash of one system, others paused or cut off", "lost answered writes, split brain",
           (), "", "none lost: in-sync set and epochs; scripts/soak cluster"),
)  # fmt: skip


class Hit(NamedTuple):
    """One damage: bytes of a file, and what was there."""

    fault: str
    place: str
    path: Path
    at: int
    before: bytes
    is_cut: bool = False

    def put_back(self) -> None:
        """Give the file back what it held."""
        with self.path.open("r+b") as file:
            file.seek(self.at)
            file.write(self.before)


def value_of(key: int, version: int) -> bytes:
    return random.Random(key * 1_000_003 + version).randbytes(300 + 700 * (key % 3))


class Load(mend.Load):
    """Reads and writes of one client. A key that is refused is asked for until it is answered."""

    def __init__(self, kv: KvClient, seed: int) -> None:
        super().__init__(kv, seed, KEYS, value_of)
        self.longest_s = 0.0
        """For how long a key was refused, since that was looked at last."""

    async def write(self, key: int) -> None:
        """Write the next version of a key; a refusal is taken."""
        began_s = time.monotonic()
        await super().write(key)
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)

    async def write_all(self) -> None:
        """Write the next version of all keys, each until it is answered."""
        for first in range(0, KEYS, BATCH):
            keys = list(range(first, first + BATCH))
            while keys:
                await asyncio.gather(*(self.write(key) for key in keys))
                keys = [key for key in keys if key in self.unsure]

    async def read(self, key: int) -> bool:
        """Read a key until it is answered, and compare."""
        began_s = time.monotonic()
        while not await super().read(key):
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)
            await asyncio.sleep(0.05)
        self.longest_s = max(self.longest_s, time.monotonic() - began_s)
        return True


class Damager:
    """Damages files of a node's folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._store = folder / "store"
        self._draw = random.Random(seed)
        self._older = (self._store / "data.mdb").read_bytes()

    def hit(self) -> Hit | None:
        """Damage something; None: this fault changes nothing there."""
        for _ in range(100):
            kind = self._draw.choice(
                ("page", "page", "page", "page", "page", "log", "sums", "file")
            )
            hit = {"page": self._page, "log": self._log, "sums": self._sums, "file": self._file}[
                kind
            ]()
            if hit is not None:
                return hit
        return None

    def _page(self) -> Hit | None:
        path = self._store / "data.mdb"
        try:
            layout = layout_of(self._store)
        except (AssertionError, ValueError, KeyError):  # it is being written
            return None
        pages: dict[str, list[int]] = {"meta page": [0, 1]}
        for table, name in TABLES.items():
            pages[f"{name} leaf"] = sorted(layout[table].leaves)
            pages[f"{name} branch"] = sorted(layout[table].branches)
        pages["versions block"] = sorted(layout["by_seqno"].large)
        place = self._draw.choice([name for name in pages if pages[name]] + ["versions block"])
        number = self._draw.choice(pages[place])
        others = [page for name in pages for page in pages[name]]
        return self._put(place, path, number * PAGE_BYTES, PAGE_BYTES, self._older, others)

    def _sums(self) -> Hit | None:
        path = self._store / "pages.sums"
        at = self._draw.randrange(path.stat().st_size & ~0xFFF or 1)
        return self._put("checksums of pages", path, at & ~3, 64, None, [])

    def _log(self) -> Hit | None:
        segments = sorted((self._folder / "log").glob("*.log")) or sorted(
            path for path in (self._folder / "log").iterdir() if path.name != "end.mark"
        )
        path = self._draw.choice(segments)
        data = path.read_bytes().rstrip(b"\0")
        if len(data) < 200:
            return None
        return self._put("log", path, self._draw.randrange(len(data) - 100), 64, None, [])

    def _file(self) -> Hit | None:
        """Damage a small file that is read at a start."""
        kept = [self._folder / name for name in (*KEPT_NAMES, MARKER_NAME)]
        names = [*kept, *map(twin_of, kept), self._folder / "log" / "end.mark"]
        paths = [path for path in names if path.exists()]
        path = self._draw.choice([*paths, max((self._folder / "log").glob("*.log"))])
        if path.suffix == ".log":
            before = path.read_bytes()
            path.write_bytes(before[: self._draw.randrange(len(before.rstrip(b"\0")))])
            return Hit("cut", f"{RESTARTED}log", path, 0, before, is_cut=True)
        size = path.stat().st_size
        place = f"{RESTARTED}{path.name}"
        before = path.read_bytes()
        if path.parent == self._folder and self._draw.random() < 0.2:
            path.unlink()
            return Hit("missing", place, path, 0, before, is_cut=True)
        if self._draw.random() < 0.3:
            path.write_bytes(before[: self._draw.randrange(size)])
            return Hit("cut", place, path, 0, before, is_cut=True)
        return self._put(place, path, 0, size, None, [])

    def _put(
        self, place: str, path: Path, at: int, size: int, older: bytes | None, others: list[int]
    ) -> Hit | None:
        with path.open("r+b") as file:
            file.seek(at)
            before = file.read(size)
            fault = self._draw.choice(FAULTS)
            after = self._damaged(fault, bytearray(before), at, older, others, path)
            if after == before:
                return None
            file.seek(at)
            file.write(after)
        return Hit(fault, place, path, at, before)

    def _damaged(
        self, fault: str, data: bytearray, at: int, older: bytes | None, others: list[int],
        path: Path,
    ) -> bytes:  # fmt: skip
        draw = self._draw
        if fault in {"bit", "bits"}:
            for _ in range(1 if fault == "bit" else draw.choice((2, 3, 40))):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif fault == "zeros":
            data[:] = bytes(len(data))
        elif fault == "sector":
            first = 512 * draw.randrange(-(-len(data) // 512))
            some = len(data[first : first + 512])
            data[first : first + 512] = draw.randbytes(some)
        elif fault == "misdirected" and others:
            page = draw.choice(others) * PAGE_BYTES
            with path.open("rb") as file:
                file.seek(page)
                data[:] = file.read(PAGE_BYTES)
        elif fault == "stale" and older is not None:
            data[:] = older[at : at + len(data)].ljust(len(data), b"\0")
        return bytes(data)


class Soak:
    """One run."""

    def __init__(self, cluster: DcpCluster, load: Load, seed: int) -> None:
        self._cluster = cluster
        self._load = load
        self._node = cluster.nodes["n2"]
        self._damager = Damager(self._node.data, seed)
        self._draw = random.Random(seed + 1)
        self._mended = 0
        """As the node counted before it was stopped last."""
        self.results: Counter[tuple[str, str, str]] = Counter()
        self.mistakes: list[str] = []
        self.compared = 0
        """Keys that were compared at the end."""
        self.slowest_s = 0.0

    async def one(self) -> None:
        """Make one damage, and take note of what becomes of it."""
        load, wrong = self._load, self._load.wrong
        load.longest_s = 0.0
        is_stopped = self._draw.random() < STOPPED_SHARE
        if is_stopped:
            self._mended = (await self._ask("GET"))["mended"]
            await asyncio.to_thread(
                self._node.kill if self._draw.random() < 0.5 else self._node.stop
            )
        hit = self._damager.hit()
        if is_stopped and hit is not None and not hit.place.startswith(RESTARTED):
            hit = hit._replace(place=f"{STOPPED}{hit.place}")
        if hit is None:
            await self._start()
            return
        began_s = time.monotonic()
        try:
            result = await self._became(hit)
        finally:
            took_s = time.monotonic() - began_s
        note = (hit.fault, hit.place)
        self.results[*note, result] += 1
        if result == "repaired":
            self.slowest_s = max(self.slowest_s, took_s)
        if load.wrong > wrong:
            self.results[*note, "wrong"] += 1
            self.mistakes.append(f"{hit.fault} of {hit.place}: a wrong answer")
        if load.longest_s > ERROR_S and not hit.place.startswith((RESTARTED, STOPPED)):
            self.results[*note, "error > 2 s"] += 1
            if result != "named":
                what = f"{hit.fault} of {hit.place} ({result})"
                self.mistakes.append(f"{what}: a client waited for {load.longest_s:.1f} s")
        print(f"{hit.fault} of {hit.place}: {result}, {took_s:.1f} s", flush=True)

    async def _became(self, hit: Hit) -> str:
        if hit.place.startswith(RESTARTED):
            return await self._restarted(hit)
        if hit.place.startswith(STOPPED):
            mended = self._mended
            if await self._restarted(hit) == "named":
                return "named"
            before = {**await self._ask("GET"), "mended": mended}
        else:
            before = await self._ask("GET")
        await self._pass(before)
        until_s = time.monotonic() + NAMED_S
        while time.monotonic() < until_s:
            status = await self._ask("GET")
            if not status["damages"]:
                return "repaired" if status["mended"] > before["mended"] else "no effect"
            await asyncio.sleep(0.1)
        await self._put_back(hit)
        await self._pass(await self._ask("GET"))
        if (await self._ask("GET"))["damages"]:
            self.mistakes.append(f"{hit.fault} of {hit.place}: named when its bytes are back")
            return "not in 60 s"
        return "named"

    async def _put_back(self, hit: Hit) -> None:
        """Give a file back what it held. A process that began with it begins anew: it knows the
        checksums of pages by heart.
        """
        if not hit.place.startswith(STOPPED):
            hit.put_back()
            return
        await asyncio.to_thread(self._node.kill)
        hit.put_back()
        await self._start()
        await asyncio.to_thread(self._cluster.wait_until_in_sync)

    async def _pass(self, before: dict[str, Any]) -> None:
        """Have everything read, unless the store cannot be opened: then that is named."""
        await self._ask("POST")
        until_s = time.monotonic() + MENDED_S
        while time.monotonic() < until_s:
            status = await self._ask("GET")
            if status["passes"] > before["passes"] and not status["is_running"]:
                return
            await asyncio.sleep(0.05)

    async def _restarted(self, hit: Hit) -> str:
        """Start the node again. If it refuses, it has to name the file."""
        log = self._node.log_path
        size = log.stat().st_size
        if self._node.runs:
            await asyncio.to_thread(self._node.kill)
        try:
            await asyncio.to_thread(self._node.start)
            result = "repaired"
        except ServerStartError:
            said = log.read_text()[size:]
            result = "named"
            names = (hit.path.name.split(".")[0], "end mark", "the log", "log segment", "the store")
            if not any(name in said for name in names):
                self.mistakes.append(
                    f"{hit.fault} of {hit.place}: refused, not named: {said[-500:]}"
                )
            if hit.is_cut:
                hit.path.write_bytes(hit.before)
            else:
                hit.put_back()
            await self._start()
        await asyncio.to_thread(self._cluster.wait_until_in_sync)
        return result

    async def _start(self) -> None:
        for attempt in range(STARTS):
            try:
                return await asyncio.to_thread(self._node.start)
            except ServerStartError:
                if attempt == STARTS - 1:
                    raise
        return None

    async def _ask(self, method: str) -> dict[str, Any]:
        """Ask the scrubber; a process that has ended is started again."""
        while True:
            try:
                body = {} if method == "POST" else None
                return await asyncio.to_thread(self._node.ask, method, "/api/v1/scrub", body)
            except (OSError, ServerRefusedError):
                if await asyncio.to_thread(_has_ended, self._node.pid):
                    self.mistakes.append("the process has ended")
                    await asyncio.to_thread(self._node.restart)
                await asyncio.sleep(0.2)

    def compare(self) -> None:
        """Stop the nodes, and compare their copies: what each has of every key, and what is
        damaged.
        """
        nodes = self._cluster.nodes
        self._cluster.wait_until_in_sync()
        for node in nodes.values():
            node.compact()
        for node in nodes.values():
            node.stop()
        copies = {name: rows_of(node.data) for name, node in nodes.items()}
        first = copies["n1"]
        for name, rows in copies.items():
            differing = [key for key in first | rows if first.get(key) != rows.get(key)]
            if differing:
                self.mistakes.append(f"{name} differs from n1 in {len(differing)} keys")
            verify = [sys.executable, "-m", "clients.cli", "verify", str(nodes[name].data)]
            told = subprocess.run(verify, capture_output=True, text=True, check=False)
            if told.returncode:
                self.mistakes.append(f"verify of {name}: {told.stdout[-1000:]}{told.stderr[-300:]}")
        self.compared = len(first)

    def table(self) -> str:
        """Return the results as lines of a table."""
        rows = sorted({key[:2] for key in self.results}, key=lambda key: (key[1], key[0]))
        lines = [f"{'place':<26} {'fault':<12} " + " ".join(f"{each:>11}" for each in RESULTS)]
        for fault, place in rows:
            counts = [self.results[fault, place, each] for each in RESULTS]
            lines.append(f"{place:<26} {fault:<12} " + " ".join(f"{each:>11}" for each in counts))
        totals = Counter(result for *_, result in self.results.elements())
        lines.append(f"{'all':<39} " + " ".join(f"{totals[each]:>11}" for each in RESULTS))
        load = self._load
        lines.append(
            f"{load.reads:,} reads: {load.refused} refused meanwhile, {load.wrong} wrong; "
            f"repaired within {self.slowest_s:.1f} s"
        )
        return "\n".join(lines)


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _keep(soak: Soak, state: Path) -> None:
    """Add the results of a run to those of earlier ones."""
    runs = json.loads(state.read_text()) if state.exists() else []
    counts = [[*key, count] for key, count in soak.results.items()]
    load = soak._load
    runs.append(
        {"counts": counts, "slowest_s": soak.slowest_s, "mistakes": soak.mistakes,
         "reads": load.reads, "refused": load.refused, "wrong": load.wrong,
         "compared": soak.compared}
    )  # fmt: skip
    state.write_text(json.dumps(runs, indent=1))


def tell(state: Path) -> str:
    """Return the table of places of all runs, and that of Jepsen's faults."""
    runs = json.loads(state.read_text()) if state.exists() else []
    counts = Counter[tuple[str, str, str]]()
    for run_ in runs:
        for fault, place, result, count in run_["counts"]:
            counts[fault, place, result] += count
    shown = RESULTS[:3]
    lines = [f"| place | damages | {' | '.join(shown)} |", "|---|---|" + "---|" * len(shown)]
    for place in sorted({place for _, place, _ in counts}):
        of = [
            sum(n for (_, p, r), n in counts.items() if (p, r) == (place, each)) for each in shown
        ]
        lines.append(f"| {place} | {sum(of)} | {' | '.join(map(str, of))} |")
    damages = sum(n for (_, _, result), n in counts.items() if result in shown)
    others = {each: sum(n for (*_, r), n in counts.items() if r == each) for each in RESULTS[3:]}
    reads = sum(run_["reads"] for run_ in runs)
    mistakes = [mistake for run_ in runs for mistake in run_["mistakes"]]
    compared = sum(run_.get("compared", 0) for run_ in runs)
    slowest_s = max((run_["slowest_s"] for run_ in runs), default=0.0)
    said = f"{damages} damages, {reads:,} reads; {others}; slowest repair {slowest_s:.1f} s"
    lines.append(f"\n{said}; {compared:,} keys of three copies compared at the ends of runs\n")
    lines += [f"WRONG: {mistake}" for mistake in mistakes]
    lines += ["| fault | NATS 2.12.1 (Jepsen, 2025) | dcpd |", "|---|---|---|"]
    for each in JEPSEN:
        of = Counter[str]()
        for (fault, place, result), count in counts.items():
            if fault in each.faults and (each.places in place):
                of[result] += count
        told = ", ".join(f"{of[result]} {result}" for result in (*shown, "wrong"))
        lines.append(f"| {each.fault} | {each.nats} | {each.other or told} |")
    return "\n".join(lines)


async def _soak(cluster: DcpCluster, *, damages: int, seed: int, state: Path) -> Soak:
    async with KvClient.connect(cluster.address, timeout_s=5.0) as kv:
        load = Load(kv, seed)
        for _ in range(2):  # so that older pages differ
            await load.write_all()
            await asyncio.gather(
                *(asyncio.to_thread(node.compact) for node in cluster.nodes.values())
            )
        soak = Soak(cluster, load, seed)
        await load.write_all()
        await asyncio.gather(*(asyncio.to_thread(node.compact) for node in cluster.nodes.values()))
        running = asyncio.ensure_future(load.run())
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        try:
            for _ in range(damages):
                if ended.is_set():
                    print("ended: the copies are compared", flush=True)
                    break
                await soak.one()
            running.cancel()
            await asyncio.wait([running])
            for key in range(KEYS):
                try:
                    async with asyncio.timeout(MENDED_S):
                        await load.read(key)
                except TimeoutError:
                    soak.mistakes.append(f"key {key} is refused at the end")
            await asyncio.to_thread(soak.compare)
        finally:
            _keep(soak, state)
    return soak


def rows_of(folder: Path) -> dict[bytes, bytes]:
    """Return the records of all keys that a stopped node's store has."""
    reader = LmdbPageReader(store_path(folder), TABLES_OF_STORE)
    try:
        return {key: bytes(value) for key, value in reader.range(BY_KEY_TABLE, b"\0")}
    finally:
        reader.close()


def run(folder: Path, *, damages: int, seed: int, state: Path) -> int:
    """Run it and print the table; return the exit code."""
    arguments = ("--partitions", f"{PARTITIONS}", "--item-cache-bytes", "0")
    with DcpCluster(*arguments, data=folder) as cluster:
        soak = asyncio.run(_soak(cluster, damages=damages, seed=seed, state=state))
    print(soak.table())
    for mistake in soak.mistakes:
        print(f"WRONG: {mistake}")
    return 1 if soak.mistakes or soak._load.wrong else 0
