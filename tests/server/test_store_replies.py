"""The server's end of the store process, over pipes in memory: cancelled reads, measured times."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import cbor2
import pytest

from dcp.server.storage import store_process as module
from dcp.server.storage.store_messages import HEAD, pack_reply
from dcp.server.storage.store_process import StoreProcess
from vbucket.upkeep.compaction import Floors, SliceReport
from vbucket.upkeep.merge import MergeReport


class Pipes:
    """A child that answers when the test says so."""

    def __init__(self) -> None:
        self.stdout = asyncio.StreamReader()
        self.stdin = self
        self.requests: list[dict[str, Any]] = []
        self.has_request = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.requests.append(cbor2.loads(data[HEAD.size :]))
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
    await answer("merge", MergeReport(1, {}, 0, {}, []), 3.0)
    assert await merged == MergeReport(1, {}, 0, {}, [])
    assert process.merge_s == 3.0
    await answer("compact", done, 2.0)
    await second
    assert process.compact_s == 2.0
