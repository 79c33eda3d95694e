"""Background tasks: none is lost, and neither is what one failed with."""

from __future__ import annotations

import asyncio

from dcp.server.observe.housekeeping import Tasks


async def test_a_failure_is_told_and_the_others_go_on() -> None:
    failures: list[Exception] = []
    tasks = Tasks(failures.append)
    may_end = asyncio.Event()

    async def fail() -> None:
        raise KeyError("a fault")

    async def wait() -> None:
        await may_end.wait()

    failed, waits = tasks.begin(fail()), tasks.begin(wait())
    await asyncio.wait([failed])
    await asyncio.sleep(0)
    assert [type(error) for error in failures] == [KeyError]
    may_end.set()
    await waits
    assert len(failures) == 1


async def test_a_stop_waits_for_the_end_of_each() -> None:
    failures: list[Exception] = []
    tasks = Tasks(failures.append)
    ended: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    for number in range(3):
        tasks.begin(wait(number))
    await asyncio.sleep(0)
    await tasks.stop()
    assert sorted(ended) == [0, 1, 2]
    assert failures == [], "a task that was cancelled has not failed"
    await tasks.stop()
