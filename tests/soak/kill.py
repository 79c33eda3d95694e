"""Kills a server under load at any moment, thousands of times. No answered change may be lost.

One life is one data folder. Each kill is one round:

1. writers on several connections send sets, deletes and increments, many in flight;
2. the server is killed (SIGKILL): at a random moment, during a merge, during its start, or its
   store process alone, and the server soon after;
3. it starts again, and every key of every writer is read.

What must hold
- every answered change is there, with its value and its CAS;
- of a writer's unanswered changes a prefix is there: they happen in order, wholly or not at all;
- seqnos and CAS of a partition rise over kills, and its version stays the same;
- a consumer that follows through all kills ends with the same map, without any rollback;
- the offline check of the folder finds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import multiprocessing
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final

from clients.consumer.consumer import Consumer
from clients.errors import ConnectError
from clients.event import Deletion, Mutation, Rollback
from clients.testing import ServerStartError
from dcp.server.storage.folder import store_path
from tests.soak.fork_server import EXEC_SHARE, ForkedServer
from tests.soak.kill_writer import WAIT_S, KillLoopError, PartitionTruth, Writer
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.store.environment import StoreFailedError
from vbucket.store.lmdb.environment_lmdb import LmdbPageReader
from vbucket.store.records import TABLES
from vbucket.store.store import StoreView
from vbucket.upkeep.merge import SLICE_PAGES

WRITERS: Final = 4
MEMTABLE: Final = "1MiB"
"""The smallest possible size, so that merges run all the time."""
MERGE_WAIT_S: Final = 1.5
SLICES_PAGES: Final = (SLICE_PAGES, 64, 16)
"""How many pages a slice of a merge may change, life by life. With few most kills leave a merge
unfinished; merges of such memtables have one slice otherwise."""
LIFE_KILLS: Final = 250
"""Then a new folder begins: every version is kept, and a life's disk space should stay bounded."""
KILLS_IN_LINE: Final = 10
OPEN_AGAIN_S: Final = 0.1
LANES_MAX: Final = 16
"""How many lives may run side by side. Each keeps a core busy for much of its time."""
LANE_LIVES: Final = 1_000_000
"""Lives are numbered from here on in each lane: the number is the seed."""
_LANES: Final = multiprocessing.get_context("spawn")


class Follower(threading.Thread):
    """A consumer in its own thread, through all kills."""

    def __init__(self, address: str) -> None:
        super().__init__(name="follower", daemon=True)
        self.documents: dict[bytes, bytes] = {}
        self.seqnos = dict.fromkeys(range(NUM_VBUCKETS), 0)
        self.failure: BaseException | None = None
        self._address = address
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        try:
            self._task = self._loop.create_task(self._follow())
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the loop that waits for us reports it
            self.failure = error
        finally:
            self._loop.close()

    def stop(self) -> None:
        if self.is_alive() and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            self.join(WAIT_S)

    async def _follow(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            consumer = await self._opened(stack)
            async for events in consumer.batches():
                for event in events:
                    self._take(event)

    async def _opened(self, stack: contextlib.AsyncExitStack) -> Consumer:
        """Open a consumer. It connects again by itself later, but an attempt to open it fails if
        the server is killed meanwhile.
        """
        while True:
            try:
                return await stack.enter_async_context(Consumer(self._address, validate=True))
            except ConnectError:
                await asyncio.sleep(OPEN_AGAIN_S)

    def _take(self, event: object) -> None:
        if isinstance(event, Rollback):
            raise KillLoopError(f"the consumer was rolled back: {event}")
        if not isinstance(event, Mutation | Deletion):
            return
        if event.seqno <= self.seqnos[event.vb_id]:
            raise KillLoopError(f"{event} came after seqno {self.seqnos[event.vb_id]}")
        if isinstance(event, Mutation):
            self.documents[event.key] = event.value
        else:
            self.documents.pop(event.key, None)
        self.seqnos[event.vb_id] = event.seqno

    def check(self, seqnos: dict[int, int], documents: dict[bytes, bytes]) -> None:
        """Wait until everything was followed, then compare."""
        give_up_at_s = time.monotonic() + WAIT_S
        while any(self.seqnos[vb_id] < seqno for vb_id, seqno in seqnos.items()):
            if self.failure is not None:
                raise KillLoopError(f"the consumer failed: {self.failure!r}") from self.failure
            if time.monotonic() > give_up_at_s:
                behind = {vb for vb, seqno in seqnos.items() if self.seqnos[vb] < seqno}
                raise KillLoopError(f"the consumer is behind in {len(behind)} partitions")
            time.sleep(0.01)
        if self.documents != documents:
            keys = self.documents.keys() | documents.keys()
            wrong = [key for key in keys if self.documents.get(key) != documents.get(key)]
            raise KillLoopError(f"the consumer's map differs in {len(wrong)} keys: {wrong[:3]}")


class Life:
    """One data folder, and everything known about it."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        resumed: dict[str, Any] | None = None,
        stopping: threading.Event | None = None,
    ) -> None:
        """`stopping`: set to make the current round the last one."""
        self.seed = seed
        self._stopping = threading.Event() if stopping is None else stopping
        self._draw = random.Random(seed if resumed is None else f"{seed} {resumed['kills']}")
        self.kills: Counter[str] = Counter(resumed["kills"] if resumed else {})
        self.others: dict[bytes, bytes] = {}
        """Documents that somebody else has stored, and that nobody changes."""
        self._truth = PartitionTruth()
        self.writers = [
            Writer(number, random.Random(self._draw.random()), self._truth)
            for number in range(WRITERS)
        ]
        if resumed is not None:
            self._truth.resume(resumed["truth"])
            for writer, document in zip(self.writers, resumed["writers"], strict=True):
                writer.resume(document)
        # Writers take a refusal for a failure, so they wait while a store process is replaced.
        self.server = ForkedServer(folder, "--memtable-bytes", MEMTABLE, "--write-wait", "25s")
        self.server.slice_pages = SLICES_PAGES[seed % len(SLICES_PAGES)]
        self.unfinished = 0
        """Starts that found an unfinished merge, since this object was made."""
        self._start_s = 0.0
        """Duration of the last start. A kill during a start comes at any point of that time."""
        self._start()
        self._follower = Follower(self.server.address)
        self._follower.start()
        try:
            self._connect()
            for writer in self.writers:
                writer.check()
        except BaseException:
            self.abandon()
            raise

    def to_document(self) -> dict[str, Any]:
        """Return the state for a later run on the same folder. Call it between rounds."""
        return {
            "seed": self.seed,
            "kills": dict(self.kills),
            "truth": self._truth.to_document(),
            "writers": [writer.to_document() for writer in self.writers],
        }

    @property
    def answers(self) -> int:
        return sum(writer.answers for writer in self.writers)

    def round(self) -> None:
        """Load, kill, start, check."""
        self._one_round(self._start)

    def round_with(self, meddle: Callable[[], None]) -> None:
        """Run a round that changes the folder while no server runs."""

        def start() -> None:
            meddle()
            self._start()

        self._one_round(start)

    def _one_round(self, start: Callable[[], None]) -> None:
        kinds = ("load", "merge", "start", "store process")
        kind = self._draw.choices(kinds, (4, 3, 2, 1))[0]
        if kind == "start":
            self._load(self._draw.uniform(0, 0.03))
            self._kill_server()
            self._start_and_kill(self._draw.uniform(0, self._start_s))
        else:
            getattr(self, f"_{kind.replace(' ', '_')}")()
            self._kill_server()
        self.kills[kind] += 1
        start()
        self._connect()
        for writer in self.writers:
            writer.check()

    def finish(self) -> None:
        """Compare the consumer's map, stop the server cleanly, check the folder offline."""
        documents = self.others | {
            key: stored.value for writer in self.writers for key, stored in writer.stored.items()
        }
        self._follower.check(self._high_seqnos(), documents)
        self._follower.stop()
        for writer in self.writers:
            writer.close()
        self.server.stop()
        self.verify()

    def abandon(self) -> None:
        """Stop everything, whatever has happened."""
        self._follower.stop()
        for writer in self.writers:
            writer.close()
        with contextlib.suppress(AssertionError):
            self.server.kill()

    def verify(self) -> None:
        """Run the offline check of the folder."""
        done = subprocess.run(
            [sys.executable, "-m", "dcp.server.check.verify", str(self.server.data)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise KillLoopError(f"dcpctl verify: {done.stdout[-3000:]}{done.stderr[-3000:]}")

    # -- moments -------------------------------------------------------------------------------

    def _load(self, seconds: float | None = None) -> None:
        """Write for some time."""
        if seconds is None:
            seconds = self._draw.uniform(0, 0.15)
        until_s = time.monotonic() + seconds
        self._pump(lambda: time.monotonic() >= until_s)

    def _merge(self) -> None:
        """Write until a merge runs, and a little longer."""
        log = self.server.data / "log"
        until_s = time.monotonic() + MERGE_WAIT_S
        self._pump(lambda: len(os.listdir(log)) > 1 or time.monotonic() > until_s)  # noqa: PTH208
        self._load(self._draw.uniform(0, 0.04))

    def _store_process(self) -> None:
        """Kill the store process, mostly during a merge; the server goes on and answers."""
        self._merge()
        for pid in self.server.children():
            os.kill(pid, signal.SIGKILL)
        self._load(self._draw.uniform(0.02, 0.3))
        if not all(writer.is_open for writer in self.writers):
            raise KillLoopError("the server closed connections when its store process died")

    def _kill_server(self) -> None:
        self.server.kill()
        for writer in self.writers:
            if writer.is_open:
                writer.drain()

    def _start(self) -> None:
        """Start the server so that it ignores Ctrl-C at the terminal: this process ends it."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.server.is_forked = self._draw.random() >= EXEC_SHARE
        self.unfinished += has_unfinished_merge(self.server.data)
        began_s = time.monotonic()
        try:
            self.server.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if self.server.is_forked:
            self._start_s = time.monotonic() - began_s

    def _start_and_kill(self, after_s: float) -> None:
        """Start the server, and kill it before or just after it is ready."""
        killer = threading.Timer(after_s, self._kill_process)
        killer.start()
        with contextlib.suppress(ServerStartError):
            self._start()
            self.server.kill()
        killer.join()

    def _kill_process(self) -> None:
        process = self.server._process
        if process is not None and process.poll() is None:
            process.kill()

    def _pump(self, is_over: Callable[[], bool]) -> None:
        selector = selectors.DefaultSelector()
        for writer in self.writers:
            selector.register(writer, selectors.EVENT_READ, writer)
            writer.begin()
            writer.pump()
        try:
            while not (is_over() or self._stopping.is_set()):
                for key, _ in selector.select(0.002):
                    key.data.pump()
                    if not key.data.is_open:
                        raise KillLoopError("the server closed a connection under load")
        finally:
            selector.close()

    def _connect(self) -> None:
        for writer in self.writers:
            writer.connect(self.server.port)

    def _high_seqnos(self) -> dict[int, int]:
        rows = self.writers[0].high_seqnos()
        for vb_id, seqno in self._truth.seqnos.items():
            if rows[vb_id] < seqno:
                raise KillLoopError(f"vb {vb_id} is at {rows[vb_id]}, {seqno} was answered")
        return rows


def has_unfinished_merge(data: Path) -> bool:
    """Whether the store of a data folder that no server uses has an unfinished merge."""
    try:
        reader = LmdbPageReader(store_path(data), TABLES)
    except StoreFailedError:
        return False  # there is no store yet
    try:
        node = StoreView(reader).node()
    finally:
        reader.close()
    return node is not None and node.part_merged is not None


def describe(kills: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kills.items()))


def run(kills_wanted: int, folder: Path, *, lanes: int = 1) -> int:
    """Kill until this many kills were survived, over all runs with this folder; return exit code.

    Each lane is a process with lives of its own. If one fails, the others stop after their round.
    """
    lane_folders = [folder, *(folder / f"lane-{lane}" for lane in range(1, LANES_MAX))]
    left = max(0, kills_wanted - sum(map(_kills_in, lane_folders)))
    processes = []
    for lane in range(lanes):
        share = left // lanes + (lane < left % lanes)
        wanted = _kills_in(lane_folders[lane]) + share
        processes.append(_LANES.Process(target=run_lane, args=(wanted, lane_folders[lane], lane)))
    for process in processes:
        process.start()

    def stop() -> None:
        for process in processes:
            if process.exitcode is None and process.pid is not None:
                os.kill(process.pid, signal.SIGINT)

    before = signal.signal(signal.SIGINT, lambda *_: stop())
    try:
        while waiting := [process.sentinel for process in processes if process.exitcode is None]:
            connection.wait(waiting)
            if any(process.exitcode for process in processes):
                stop()
    finally:
        signal.signal(signal.SIGINT, before)
    print(f"{sum(map(_kills_in, lane_folders)):,} of {kills_wanted:,} kills in all")
    return int(any(process.exitcode for process in processes))


def run_lane(kills_wanted: int, folder: Path, lane: int, *, life_kills: int = LIFE_KILLS) -> None:
    """Kill until this many kills were survived, over all runs with this folder.

    Ctrl-C, or the end of the process that started this one, ends the current round and keeps the
    state of its folder, and the next run continues there. A run that ends otherwise keeps only the
    count, and the next one begins a new life. The folder of a life that failed is kept.
    """
    logging.getLogger("dcpd.consumer").setLevel(logging.ERROR)  # do not log every lost server
    folder.mkdir(parents=True, exist_ok=True)
    state_path = folder / "state.json"
    state = _state_in(folder) or {"kills": 0, "life": lane * LANE_LIVES}
    resumed = state.pop("resumed", None)
    began_s, began_kills = time.monotonic(), state["kills"]
    starter, stopping = multiprocessing.parent_process(), threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopping.set())
    while state["kills"] < kills_wanted and not stopping.is_set():
        data = folder / f"life-{state['life']}"
        if resumed is None:
            if data.exists():  # it failed, or this program was killed
                data.rename(data.with_name(f"{data.name}-failed-{time.time_ns()}"))
            data.mkdir()
        _save(state_path, state)
        life = Life(data / "data", state["life"], resumed, stopping)
        resumed = None
        is_over = False
        try:
            while not is_over and life.kills.total() < life_kills and state["kills"] < kills_wanted:
                life.round()
                state["kills"] += 1
                if starter is not None and not starter.is_alive():
                    stopping.set()
                is_over = stopping.is_set()
                if state["kills"] % KILLS_IN_LINE == 0 or is_over:
                    rate = (state["kills"] - began_kills) / (time.monotonic() - began_s)
                    _save(state_path, state)
                    print(
                        f"lane {lane}: {state['kills']:,} of {kills_wanted:,} kills, "
                        f"{rate * 60:.0f}/min; life {state['life']}: {life.answers:,} answered "
                        f"changes, {describe(life.kills)}; "
                        f"{life.unfinished} starts after an unfinished merge",
                        flush=True,
                    )
            if is_over:
                _save(state_path, state | {"resumed": life.to_document()})
            else:
                life.finish()
                state["life"] += 1
                _save(state_path, state)
        except BaseException:
            print(f"life {state['life']} failed after {life.kills}; its folder is {data}")
            raise
        finally:
            life.abandon()
        if not is_over:
            shutil.rmtree(data)
    print(f"lane {lane}: {state['kills']:,} kills: nothing that was answered is lost", flush=True)


def _state_in(folder: Path) -> dict[str, Any] | None:
    path = folder / "state.json"
    state: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return state


def _kills_in(folder: Path) -> int:
    state = _state_in(folder)
    return 0 if state is None else state["kills"]


def _save(path: Path, state: dict[str, Any]) -> None:
    new = path.with_suffix(".tmp")
    new.write_text(json.dumps(state))
    new.replace(path)
