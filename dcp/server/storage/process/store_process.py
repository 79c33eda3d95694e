"""The store process: the only writer of the store while a server runs.

The server starts it and tells it which sealed segments to merge, while it goes on answering. LMDB's
write lock, and the GIL that py-lmdb releases on every put, do not disturb the event loop.
`StoreProcess` is the server's end, `main` is the child's
(`python -m dcp.server.storage.process.store_process`).

`dcp.server.storage.process.store_messages` has the messages on the child's stdin and stdout.

Invariants
- requests are handled one after another, in order;
- a request has its whole effect or none, whenever the child dies; a merge may have the effect of
  its first slices, and the next one goes on after them;
- a child that sends neither beat nor reply for `silence_s` is killed: it was stopped, or hangs.
  A long transaction on a slow disk does not count, because another thread sends the beats;
- a child does nothing after its server's end: it is killed with the server (Linux), ends at the end
  of its stdin, and commits nothing once it has another parent. It holds the folder's lock until its
  end, so no new server opens the folder beside it.

The child does not import asyncio, because it must start in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import cbor2

from dcp.core.store_schedule import SLICE_S
from dcp.server.storage.folder import log_path, store_path
from dcp.server.storage.memory_share import tune_memory
from dcp.server.storage.process.rests import Rests
from dcp.server.storage.process.scrub_work import ScrubWork
from dcp.server.storage.process.store_messages import (
    FORGET,
    HEAD,
    HURRY,
    LENGTH,
    PACKET,
    Inbox,
    Packets,
    Replies,
    pack_request,
)
from vbucket.check.scrub import ScrubReport
from vbucket.engine.loading.store_load import LoadReport, LoadRequest, Packet, load
from vbucket.log.device import UnknownFormatError
from vbucket.log.record import LogDamagedError
from vbucket.log.segment_files import read_segment
from vbucket.store.block import BlockDamagedError
from vbucket.store.environment import (
    KeptRows,
    KvEnv,
    MapFullError,
    StoreDamagedError,
    StoreFailedError,
    StoreFullError,
    with_room,
)
from vbucket.store.hashes import HashTables
from vbucket.store.key_record import RecordDamagedError
from vbucket.store.lmdb.environment_lmdb import MAP_SIZE_BYTES, LmdbEnv
from vbucket.store.lmdb.page_sums import KnownSums
from vbucket.store.records import (
    BY_SEQNO_TABLE,
    RECORD_TABLES,
    TABLES,
    put_failover,
)
from vbucket.store.store import StoreView
from vbucket.upkeep.compaction import FREE_PAGES_BYTES, Compactor, Floors, SliceReport
from vbucket.upkeep.merge import SLICE_PAGES, MergeReport, merge
from vbucket.upkeep.retention import DiskUse, FloorStep, Planner, PlanReport, Windows
from vbucket.upkeep.staging import MergeRefusedError

if TYPE_CHECKING:
    import asyncio

DEFAULT_NICE: Final = 5
SILENCE_S: Final = 30.0
"""How long a child may be silent while it handles a request. These are many beats, because a
machine that swaps needs time."""
STOP_S: Final = 3.0
"""Time for a child to finish its request and end, before it is killed."""
_GONE_S: Final = 1.0
"""Time for the system to remove a killed child."""
_PR_SET_PDEATHSIG: Final = 1
_WHOLE: Final = "it stored all of that, nothing, or, of a merge, whole slices"
_ERRORS: Final[dict[str, type[Exception]]] = {
    error.__name__: error
    for error in (
        BlockDamagedError, LogDamagedError, MapFullError, MergeRefusedError, RecordDamagedError,
        StoreDamagedError, StoreFailedError, StoreFullError, UnknownFormatError,
    )
}  # fmt: skip
"""Errors that a request may end with. The child goes on."""


class StoreProcessDiedError(Exception):
    """The store process ended unexpectedly. Its request had no effect; start another process."""


class StoreProcess:
    """The server's end of a running store process. Create it with `start`."""

    slice_pages: ClassVar[int] = SLICE_PAGES
    """How many pages a slice of a merge may change. `tests.soak.kill` lowers it."""

    def __init__(self, process: asyncio.subprocess.Process, silence_s: float = SILENCE_S) -> None:
        import asyncio

        self._process = process
        self._silence_s = silence_s
        self._turn = asyncio.Lock()
        self._last_id = 0
        self._reply_bytes = 0
        """Length of the reply that is being read; 0 if not known yet."""
        self._sent: dict[int, int] = {}
        """Bytes of the packets that the child has, or will have read, by number."""
        self.ahead_bytes = 0
        """The sum of these, those of a load under way included."""
        self._merge_id = 0
        """The merge under way, unless it was hurried; 0: there is none."""
        self.part = 0.0
        """How much of the merge under way is done, 0 to 1; 0: not known yet."""
        self.merge_s = 0.0
        self.compact_s = 0.0
        """Durations of the last merge and of the last slice of a compaction, without the wait for
        earlier requests, and without rests."""

    @classmethod
    async def start(
        cls,
        data_path: Path,
        lock_fd: int,
        *,
        nice: int = DEFAULT_NICE,
        map_size_bytes: int = MAP_SIZE_BYTES,
        silence_s: float = SILENCE_S,
    ) -> StoreProcess:
        """Start a store process for a data folder whose lock `lock_fd` holds.

        `map_size_bytes` is the initial size of the map. The child runs `nice` steps below the
        server. Call it on a thread that lives as long as the server: on Linux the child is killed
        when that thread ends.
        """
        import asyncio

        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "dcp.server.storage.process.store_process",
            str(data_path), str(os.getpid()), str(nice), str(map_size_bytes), str(cls.slice_pages),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, pass_fds=(lock_fd,),
        )  # fmt: skip
        return cls(process, silence_s)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    async def merge(self, segments: list[int], share: float = 1.0) -> MergeReport:
        """Merge sealed segments; durable on return. The child works for `share` of the time, and
        rests in between, until `hurry`.

        Raises what vbucket.upkeep.merge.merge raises (LogDamagedError for a missing segment), and
        StoreProcessDiedError.
        """
        import asyncio

        async with self._turn:
            began_s = time.monotonic()
            self._merge_id = self._last_id + 1
            try:
                report, rested_s = await self._ask(
                    {"op": "merge", "segments": segments, "share": share}
                )
            except asyncio.CancelledError:
                self.hurry()  # nobody waits for it, but other work may
                raise
            finally:
                self._merge_id = 0
            self.merge_s = time.monotonic() - began_s - rested_s
        return MergeReport(*report)

    def hurry(self) -> None:
        """Let the merge under way, if there is one, rest no more. Does not wait."""
        stdin = self._process.stdin
        if self._merge_id and stdin is not None and not stdin.is_closing():
            stdin.write(HEAD.pack(HURRY, 0, self._merge_id))
            self._merge_id = 0

    async def set_failovers(self, logs: dict[int, list[list[int]]]) -> None:
        """Write the failover logs of partitions, after earlier requests: all or none. Raises as
        `merge` does.
        """
        await self._request({"op": "failover", "logs": logs})

    async def plan(
        self,
        vb_ids: list[int],
        windows: Windows,
        now_ns: int,
        inflow_bytes: int,
        purge_max: dict[int, int],
        is_forced: bool,
    ) -> PlanReport:
        """Find floors worth raising, for a limited time; `planned` is how many partitions it got
        through. `inflow_bytes`: what merges may add until the next plan. `purge_max`: how far
        partitions may be purged that keep deletions for consumers.
        """
        request = {
            "op": "plan", "vbs": vb_ids, "windows": windows, "now_ns": now_ns,
            "inflow": inflow_bytes, "purge_max": purge_max, "forced": is_forced,
        }  # fmt: skip
        report = PlanReport(*await self._request(request))
        return report._replace(steps=[FloorStep(*step) for step in report.steps])

    async def compact(self, floors: dict[int, Floors]) -> SliceReport:
        """Compact these partitions for one slice, which is one transaction; durable on return.

        The floors must be in the log. Afterwards the caller moves readers of the store to its
        newest state: pages that a transaction has freed can be reused two transactions later only
        if nobody reads them. Raises as `merge` does.
        """
        async with self._turn:
            began_s = time.monotonic()
            report = SliceReport(*await self._ask({"op": "compact", "floors": floors}))
            self.compact_s = time.monotonic() - began_s
        return report

    async def load(
        self, requests: list[LoadRequest], cas_max: int, manifest_uid: int
    ) -> list[LoadReport]:
        """Load documents of a restore (`vbucket.engine.loading.store_load`); durable on return.
        Packets that were not sent ahead are sent now. Afterwards the child has none of them.
        """
        packets = [packet for request in requests for packet in request.packets]
        loads = [
            (*request[:-1], [(packet.frames, packet.number) for packet in request.packets])
            for request in requests
        ]
        request = {"op": "load", "loads": loads, "cas_max": cas_max, "manifest": manifest_uid}
        async with self._turn:
            for packet in packets:
                self.send_ahead(packet)
            try:
                reports = await self._ask(request)
            finally:
                for packet in packets:
                    self.ahead_bytes -= self._sent.pop(packet.number, 0)
        return [LoadReport(*report) for report in reports]

    def send_ahead(self, packet: Packet) -> None:
        """Send a packet of a later load, unless it was sent. Does not wait."""
        stdin = self._process.stdin
        if packet.number in self._sent or stdin is None or stdin.is_closing():
            return
        self._sent[packet.number] = len(packet.value)
        self.ahead_bytes += len(packet.value)
        stdin.write(HEAD.pack(PACKET, len(packet.value), packet.number))
        stdin.write(packet.value)

    def forget(self, number: int) -> None:
        """Let the child drop a packet that no load will have, if it was sent."""
        stdin = self._process.stdin
        if number not in self._sent:
            return
        self.ahead_bytes -= self._sent.pop(number)
        if stdin is not None and not stdin.is_closing():
            stdin.write(HEAD.pack(FORGET, 0, number))

    async def scrub(self, place: list[Any], log_end: list[int], suspects: list[int]) -> ScrubReport:
        """Read the next piece of the store or the log, and the partitions `suspects`; name what is
        damaged, and mend what this folder alone can prove. `place` is a `ScrubPlace`, `log_end` a
        `LogEnd`.
        """
        request = {"op": "scrub", "place": place, "log_end": log_end, "suspects": suspects}
        return ScrubReport(*await self._request(request))

    async def put_versions(self, key: bytes, entries: list[bytes]) -> str:
        """Mend a block of `by_seqno` with versions of another copy; return how, "" if they are not
        what was there.
        """
        how: str = await self._request({"op": "put_versions", "key": key, "entries": entries})
        return how

    async def used_bytes(self) -> int:
        """Return the size of the store's tables, without free pages."""
        used_bytes: int = await self._request({"op": "used_bytes"})
        return used_bytes

    async def stop(self) -> bool:
        """End the child after its current request; kill it if that takes longer than STOP_S.

        Return whether it has ended: a killed process stays while it waits for the disk. May be
        called again.
        """
        import asyncio

        if self._process.stdin is not None:
            self._process.stdin.close()
        for timeout_s in (STOP_S, _GONE_S):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
            else:
                await self._read_to_end()
                return True
        return False

    async def _read_to_end(self) -> None:
        """Read what an ended child has left, so that its pipe is closed with it."""
        import asyncio

        stdout = self._process.stdout
        assert stdout is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S), self._turn:
                await stdout.read()

    def kill(self) -> None:
        """Kill the child; its request has no effect. `stop` waits for its end."""
        if self._process.returncode is None:
            self._process.kill()

    async def _request(self, request: dict[str, Any]) -> Any:
        async with self._turn:
            return await self._ask(request)

    async def _ask(self, request: dict[str, Any]) -> Any:
        """Send a request and return its result. The caller holds the turn."""
        import asyncio

        self._last_id += 1
        request_id = request["id"] = self._last_id
        try:
            async with asyncio.timeout(self._silence_s):
                await self._send(request)
            reply: dict[str, Any] = {}
            # Beats have no id. Skip replies to cancelled requests.
            while reply.get("id") != request_id:
                async with asyncio.timeout(self._silence_s):
                    reply = await self._read()
                self.part = reply.get("beat", 0.0)
        except TimeoutError as error:
            self.kill()
            raise StoreProcessDiedError(
                f"the store process {self.pid} sent nothing for {self._silence_s:g} s during "
                f"{request['op']!r} and was killed; {_WHOLE}. Start another one"
            ) from error
        except (EOFError, ConnectionError) as error:
            status = await self._process.wait()
            raise StoreProcessDiedError(
                f"the store process {self.pid} ended with status {status} during "
                f"{request['op']!r}; {_WHOLE}. Start another one"
            ) from error
        if "error" in reply:
            raise _ERRORS[reply["error"]](reply["text"])
        return reply["result"]

    async def _send(self, request: dict[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        if stdin.is_closing():
            raise ConnectionResetError("the store process was stopped")
        stdin.write(pack_request(request))
        await stdin.drain()

    async def _read(self) -> dict[str, Any]:
        """Read the next reply or beat.

        Each await may be cancelled. Then it has consumed nothing, so the next call reads the same
        message.
        """
        stdout = self._process.stdout
        assert stdout is not None
        if not self._reply_bytes:
            (self._reply_bytes,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        data = await stdout.readexactly(self._reply_bytes)
        self._reply_bytes = 0
        reply: dict[str, Any] = cbor2.loads(data)
        return reply


class StoreWork:
    """The operations of the child, and its memory between requests."""

    def __init__(
        self,
        env: KvEnv,
        log_folder: Path,
        before_commit: Callable[[], None] = lambda: None,
        packets: Packets | None = None,
        rests: Rests | None = None,
        *,
        slice_pages: int = SLICE_PAGES,
        kept: KeptRows | None = None,
        by_heart: KnownSums | None = None,
    ) -> None:
        self._env = env
        self._log_folder = log_folder
        self._packets = packets or Packets()
        self._rests = rests or Rests()
        self._before_commit = before_commit
        self._slice_pages = slice_pages
        self._compactor = Compactor()
        self._planner = Planner()
        self._hash_tables = HashTables()
        self._scrub = ScrubWork(log_folder.parent, kept, by_heart)

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request and return the reply; an error of `_ERRORS` becomes a reply.

        If the map is full, it grows, and the operation starts again.
        """
        operation = OPERATIONS[request["op"]]
        try:
            self._scrub.put_back(self._env.mend(is_whole=request["op"] in _COMPARING))
            result = with_room(self._env, lambda: operation(self, request))
        except tuple(_ERRORS.values()) as error:
            return _refusal(request, error)
        finally:
            for *_, named in request.get("loads", ()):
                self._packets.forget(number for _, number in named)
        self._env.copy_rows()
        return {"id": request["id"], "result": result}

    def merge(self, request: dict[str, Any]) -> tuple[MergeReport, float]:
        """Merge sealed segments. Return the seconds that it rested, too."""
        segments = _SealedSegments(self._log_folder, request["segments"])
        self._rests.begin(request["id"], request["share"])
        report = merge(
            self._env, segments, hash_tables=self._hash_tables, before_commit=self._before_commit,
            slice_pages=self._slice_pages, step=self._rests.step,
            before_undo=self._compactor.begin_again, mend=self._scrub.mend_partition,
        )  # fmt: skip
        return report, self._rests.rested_s

    def set_failovers(self, request: dict[str, Any]) -> None:
        """Write the failover logs of partitions."""
        with self._env.write() as write:
            for vb_id, log in request["logs"].items():
                put_failover(write, vb_id, log)
            self._before_commit()

    def plan(self, request: dict[str, Any]) -> PlanReport:
        """Find floors worth raising."""
        end_s = time.monotonic() + SLICE_S
        blocks_bytes = self._env.used_bytes([BY_SEQNO_TABLE])
        other_bytes = self._env.used_bytes() - blocks_bytes
        snapshot = self._env.snapshot()
        try:
            return self._planner.plan(
                StoreView(snapshot),
                request["vbs"],
                Windows(*request["windows"]),
                request["now_ns"],
                use=DiskUse(blocks_bytes, other_bytes, request["inflow"], FREE_PAGES_BYTES),
                purge_max=request["purge_max"],
                is_forced=request["forced"],
                is_over=lambda: time.monotonic() >= end_s,
            )
        finally:
            snapshot.close()

    def compact(self, request: dict[str, Any]) -> SliceReport:
        """Compact for one transaction."""
        end_s = time.monotonic() + SLICE_S
        floors = {vb_id: Floors(*item) for vb_id, item in request["floors"].items()}
        return self._compactor.run(
            self._env,
            floors,
            lambda: time.monotonic() >= end_s,
            floors=floors,
            before_commit=self._before_commit,
        )

    def load(self, request: dict[str, Any]) -> list[LoadReport]:
        """Load documents of a restore."""
        packets = self._packets
        loads = [
            LoadRequest(
                vb_id, high_seqno, vb_uuid, epoch,
                [Packet(frames, packets.get(number), number) for frames, number in named],
            )
            for vb_id, high_seqno, vb_uuid, epoch, named in request["loads"]
        ]  # fmt: skip
        return load(
            self._env, loads,
            cas_max=request["cas_max"], manifest_uid=request["manifest"],
            hash_tables=self._hash_tables, before_commit=self._before_commit,
        )  # fmt: skip

    def scrub(self, request: dict[str, Any]) -> ScrubReport:
        """Read a piece."""
        return self._scrub.piece(request)

    def put_versions(self, request: dict[str, Any]) -> str:
        """Mend a block."""
        return self._scrub.put_versions(request["key"], request["entries"])

    def used_bytes(self, _request: dict[str, Any]) -> int:
        """Return the size of the tables."""
        return self._env.used_bytes()


_COMPARING: Final = frozenset({"merge", "failover", "compact", "load", "scrub", "put_versions"})
"""Operations before which all checksums of pages are looked at: those that would lose a write, or
mend a page that is right, by a checksum that is wrong."""
OPERATIONS: Final[dict[str, Callable[[StoreWork, dict[str, Any]], Any]]] = {
    "merge": StoreWork.merge,
    "failover": StoreWork.set_failovers,
    "plan": StoreWork.plan,
    "compact": StoreWork.compact,
    "load": StoreWork.load,
    "scrub": StoreWork.scrub,
    "put_versions": StoreWork.put_versions,
    "used_bytes": StoreWork.used_bytes,
}


def main(arguments: list[str]) -> None:
    """Serve requests until stdin ends. Arguments: data folder, parent's pid, nice, map size, pages
    of a slice.
    """
    data_path = Path(arguments[0])
    parent_pid, nice, map_size_bytes, slice_pages = map(int, arguments[1:])

    def end_without_parent() -> None:
        if os.getppid() != parent_pid:
            raise SystemExit("the store process lost its server and stores nothing more")

    # The terminal's Ctrl-C and a service manager's SIGTERM reach both processes. This one ends
    # when the server has finished with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    end_without_parent()  # the parent may have died before prctl
    os.nice(nice)
    tune_memory()
    try:
        env = LmdbEnv(store_path(data_path), TABLES, map_size_bytes=map_size_bytes)
    except tuple(_ERRORS.values()) as error:
        _serve(partial(_refusal, error=error), Packets(), Rests())
        return
    packets, rests = Packets(), Rests()
    log_folder = log_path(data_path)
    work = StoreWork(
        env, log_folder, end_without_parent, packets, rests, slice_pages=slice_pages,
        kept=env.keep_rows(RECORD_TABLES),
        by_heart=env.by_heart,
    )  # fmt: skip
    env.copy_rows()
    _serve(work.handle, packets, rests)
    env.close()


def _serve(
    handle: Callable[[dict[str, Any]], dict[str, Any]], packets: Packets, rests: Rests
) -> None:
    """Answer requests until stdin ends."""
    # Not sys.stdin: a process that ends waits for a thread that reads it.
    stdin = open(sys.stdin.fileno(), "rb", closefd=False)  # noqa: SIM115 - read until the end
    inbox, replies = Inbox(stdin, packets, rests), Replies(sys.stdout.buffer, rests)
    while (request := inbox.next_request()) is not None:
        with replies.beating():
            reply = handle(request)
        replies.send(reply)


def _refusal(request: dict[str, Any], error: Exception) -> dict[str, Any]:
    """Return the reply that says why a request failed."""
    name = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
    return {"id": request["id"], "error": name, "text": str(error)}


class _SealedSegments:
    """Sealed segments, each read when needed; may be iterated again."""

    def __init__(self, log_folder: Path, segments: list[int]) -> None:
        self._log_folder = log_folder
        self._segments = segments

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes. Raises LogDamagedError if one is missing."""
        for segment in self._segments:
            yield segment, _sealed(self._log_folder, segment)


def _sealed(log_folder: Path, segment: int) -> bytes:
    try:
        return read_segment(log_folder, segment)
    except KeyError:
        raise LogDamagedError(
            f"log segment {segment} is missing in {log_folder}; put the file back, or restore the "
            "data folder from a backup"
        ) from None


if __name__ == "__main__":
    main(sys.argv[1:])
