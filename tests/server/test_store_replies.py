"""The server's end of the store process, over pipes in memory: cancelled reads, measured times."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import threading
from types import SimpleNamespace
from typing import Any, BinaryIO

import cbor2
import pytest

from dcp.server.storage.process import store_process as module
from dcp.server.storage.process.rests import Rests
from dcp.server.storage.process.store_messages import (
    FORGET,
    HEAD,
    HURRY,
    LENGTH,
    PACKET,
    Inbox,
    Packets,
    Replies,
    pack_reply,
    pack_request,
)
from dcp.server.storage.process.store_process import StoreProcess
from vbucket.engine.loading.store_load import LoadReport, LoadRequest, Packet
from vbucket.store.environment import StoreDamagedError
from vbucket.upkeep.compaction import Floors, SliceReport
from vbucket.upkeep.merge import MergeReport


class Pipes:
    """A child that answers when the test says so."""

    def __init__(self) -> None:
        self.stdout = asyncio.StreamReader()
        self.stdin = self
        self.requests: list[dict[str, Any]] = []
        self.has_request = asyncio.Event()
        self.packets: list[tuple[int, bytes]] = []
        self.forgotten: list[int] = []
        self.hurried: list[int] = []
        self._data = b""

    def write(self, data: bytes) -> None:
        self._data += data
        while len(self._data) >= HEAD.size:
            kind, length, number = HEAD.unpack_from(self._data)
            stop = HEAD.size + (0 if kind in {FORGET, HURRY} else length)
            if len(self._data) < stop:
                return
            body, self._data = self._data[HEAD.size : stop], self._data[stop:]
            if kind == PACKET:
                self.packets.append((number, body))
            elif kind == FORGET:
                self.forgotten.append(number)
            elif kind == HURRY:
                self.hurried.append(number)
            else:
                self.requests.append(cbor2.loads(body))
                self.has_request.set()

    async def drain(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False

    async def request(self) -> dict[str, Any]:
        """Return the next request once it is there."""
        await self.has_request.wait()
        self.has_request.clear()
        return self.requests[-1]

    def reply(self, request: dict[str, Any], result: Any) -> bytes:
        return pack_reply({"id": request["id"], "result": result})


def process_of(pipes: Pipes) -> StoreProcess:
    process: Any = pipes
    return StoreProcess(process)


async def settle() -> None:
    """Let tasks run until they wait for the child."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("arrived_bytes", [0, 2, 4, 7])
async def test_a_request_may_be_cancelled_in_the_middle_of_its_reply(arrived_bytes: int) -> None:
    pipes = Pipes()
    process = process_of(pipes)
    cancelled = asyncio.create_task(process.used_bytes())
    reply = pipes.reply(await pipes.request(), 111)
    pipes.stdout.feed_data(reply[:arrived_bytes])
    await settle()
    cancelled.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await cancelled
    asked = asyncio.create_task(process.used_bytes())
    request = await pipes.request()
    pipes.stdout.feed_data(reply[arrived_bytes:] + pipes.reply(request, 222))
    assert await asyncio.wait_for(asked, 10) == 222


async def test_beats_tell_how_much_of_a_merge_is_done() -> None:
    pipes = Pipes()
    process = process_of(pipes)
    merging = asyncio.create_task(process.merge([1]))
    request = await pipes.request()
    assert process.part == 0.0
    pipes.stdout.feed_data(pack_reply({"beat": 0.25}))
    await settle()
    assert process.part == 0.25
    report = MergeReport(1, {}, 0, {}, [])
    pipes.stdout.feed_data(pipes.reply(request, (report, 0.0)))
    assert await asyncio.wait_for(merging, 10) == report
    assert process.part == 0.0


def test_the_child_beats_with_what_its_rests_were_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp.server.storage.process.store_messages.BEAT_S", 0.01)
    rests = Rests()
    rests.begin(1, 1.0)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as server, os.fdopen(writing, "wb") as child:
        replies = Replies(child, rests)
        with replies.beating():
            rests.step(0.5)
            parts = [beat_of(server)]
            while parts[-1] != 0.5:
                parts.append(beat_of(server))
        rests.begin(2, 1.0)
    assert set(parts) <= {0.0, 0.5}
    assert rests.part == 0.0


def beat_of(server: BinaryIO) -> float:
    """Read the next beat."""
    (length,) = LENGTH.unpack(server.read(LENGTH.size))
    message: dict[str, float] = cbor2.loads(server.read(length))
    return message["beat"]


async def test_times_are_those_of_the_work_and_not_of_the_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A merge that waits for a slice of a compaction takes no longer for it, and the other way
    around: writers are paced by what a merge takes.
    """
    now_s = 1_000.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    pipes = Pipes()
    process = process_of(pipes)

    async def answer(op: str, result: Any, seconds: float) -> None:
        nonlocal now_s
        request = await pipes.request()
        assert request["op"] == op
        await settle()
        now_s += seconds
        pipes.stdout.feed_data(pipes.reply(request, result))

    done = SliceReport([5], 1, 0, [])
    first, merged, second = (
        asyncio.create_task(process.compact({5: Floors(1, 0)})),
        asyncio.create_task(process.merge([1])),
        asyncio.create_task(process.compact({5: Floors(1, 0)})),
    )
    await answer("compact", done, 0.25)
    assert await first == done
    assert process.compact_s == 0.25
    await answer("merge", (MergeReport(1, {}, 0, {}, []), 1.0), 3.0)
    assert await merged == MergeReport(1, {}, 0, {}, [])
    assert process.merge_s == 2.0, "it rested for a second"
    await answer("compact", done, 2.0)
    await second
    assert process.compact_s == 2.0


async def test_a_hurry_names_the_merge_under_way_once() -> None:
    pipes = Pipes()
    process = process_of(pipes)
    process.hurry()
    for _ in range(2):
        merged = asyncio.create_task(process.merge([1], 0.5))
        request = await pipes.request()
        assert request["share"] == 0.5
        process.hurry()
        process.hurry()
        pipes.stdout.feed_data(pipes.reply(request, (MergeReport(1, {}, 0, {}, []), 0.0)))
        await merged
        process.hurry()
        assert pipes.hurried[-1] == request["id"]
    assert len(pipes.hurried) == 2


async def test_packets_travel_once_and_before_the_load_that_names_them() -> None:
    pipes = Pipes()
    process = process_of(pipes)
    first, second, third = (Packet(4, b"packet %d" % number, number) for number in (1, 2, 3))
    for packet in (first, first, third):
        process.send_ahead(packet)
    assert process.ahead_bytes == 2 * len(first.value)
    process.forget(third.number)
    process.forget(third.number)
    assert (process.ahead_bytes, pipes.forgotten) == (len(first.value), [3])
    report = LoadReport(5, "", 8, 9, 8, [])

    async def load(result: dict[str, Any]) -> None:
        request = LoadRequest(5, 0, 77, 1, [first, second])
        asked = asyncio.create_task(process.load([request], 9, 0))
        sent = await pipes.request()
        assert sent["loads"] == [[5, 0, 77, 1, [[4, 1], [4, 2]]]]
        pipes.stdout.feed_data(pack_reply({"id": sent["id"], **result}))
        assert await asked == [report]

    with pytest.raises(StoreDamagedError, match="a page"):
        await load({"error": "StoreDamagedError", "text": "a page"})
    assert pipes.packets == [(1, first.value), (3, third.value), (2, second.value)]
    assert process.ahead_bytes == 0, "the child has dropped them"
    await load({"result": [list(report)]})
    assert pipes.packets[3:] == [(1, first.value), (2, second.value)]
    assert process.ahead_bytes == 0


def test_child_reads_packets_while_working_and_drops_forgotten() -> None:
    packets = Packets()
    told = threading.Event()

    class Told(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            if len(data) != size:
                told.set()
            return data

    data = b"".join([
        pack_request({"id": 1, "op": "merge"}), HEAD.pack(PACKET, 3, 7) + b"one",
        HEAD.pack(PACKET, 3, 8) + b"two", HEAD.pack(FORGET, 0, 7), pack_request({"id": 2}),
        HEAD.pack(PACKET, 3, 9) + b"cu",
    ])  # fmt: skip
    rests = Rests()
    inbox = Inbox(Told(data), packets, rests)
    assert told.wait(20), "nobody has asked for a request"
    assert inbox.next_request() == {"id": 1, "op": "merge"}
    assert packets.get(8) == b"two"
    for number in (7, 9):
        with pytest.raises(KeyError):
            packets.get(number)
    assert [inbox.next_request(), inbox.next_request()] == [{"id": 2}, None]
