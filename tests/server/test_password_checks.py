"""Derivations: how many at a time, whose turn it is, and who is told."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator

import pytest

from dcp.server.access import password_checks
from dcp.server.access.password_checks import NICENESS, NICENESS_MAX, THREADS, PasswordChecks
from dcp.server.access.users import PasswordCheck
from dcp.session.access.scram import ScramKeys

WAIT_S = 20.0
NO_KEYS = ScramKeys(b"", 1, b"", b"")


class Derivations:
    """What is derived, one after another, when the test lets it."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.threads: set[int] = set()
        self.under_way = self.most = 0
        self.may_end = threading.Semaphore(0)
        self._lock = threading.Lock()

    def run(self, name: str) -> bool:
        with self._lock:
            self.begun.append(name)
            self.threads.add(threading.get_native_id())
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        assert self.may_end.acquire(timeout=WAIT_S)
        with self._lock:
            self.under_way -= 1
        if name.startswith("fails"):
            raise MemoryError
        return name.startswith("right")


class Check(PasswordCheck):
    """A check whose derivation the test steers."""

    derivations: Derivations

    def matches(self) -> bool:
        return self.derivations.run(self.user)


class Asker:
    """Submits checks and gathers what is told."""

    def __init__(self, **limits: int) -> None:
        self.derivations = Derivations()
        self.blocked: set[str] = set()
        self.checks = PasswordChecks(lambda host, user: host in self.blocked, **limits)
        self.told: dict[str, list[bool | None]] = {}
        self.refused: list[str] = []
        self.tickets: dict[str, password_checks.Ticket] = {}

    def ask(self, host: str, name: str, as_name: str = "") -> None:
        check = Check(name, "", NO_KEYS, True, name.encode())
        check.derivations = self.derivations
        told = self.told.setdefault(as_name or f"{host} {name}", [])
        ticket = self.checks.submit(host, check, told.append)
        if ticket is None:
            self.refused.append(f"{host} {name}")
        else:
            self.tickets[as_name or f"{host} {name}"] = ticket

    async def let_end(self, count: int = 1) -> None:
        """Let derivations end, one after another, each told before the next."""
        for _ in range(count):
            before = sum(map(len, self.told.values()))
            self.derivations.may_end.release()
            async with asyncio.timeout(WAIT_S):
                while sum(map(len, self.told.values())) == before:  # noqa: ASYNC110
                    await asyncio.sleep(0)


@pytest.fixture
async def asker(request: pytest.FixtureRequest) -> AsyncIterator[Asker]:
    asker = Asker(**getattr(request, "param", {}))
    yield asker
    asker.derivations.may_end.release(1000)
    await asker.checks.close()


async def test_a_few_run_at_a_time_and_every_one_is_told(asker: Asker) -> None:
    names = [f"{'right' if at % 2 else 'wrong'}{at}" for at in range(20)]
    for name in names:
        asker.ask("h", name)
    assert len(asker.checks) == 20
    await asker.let_end(20)
    assert asker.derivations.most == THREADS
    assert asker.told == {f"h {name}": [name.startswith("right")] for name in names}
    assert len(asker.checks) == 0


async def test_addresses_take_turns(asker: Asker) -> None:
    for at in range(30):
        asker.ask("flood", f"flood{at:02}")
    asker.ask("quiet", "right")
    asker.ask("other", "right other")
    await asker.let_end(32)
    begun = asker.derivations.begun
    # Its turn comes after those that were under way, and one more of the flood at most.
    assert begun.index("right") <= THREADS + 1
    assert begun.index("right other") <= THREADS + 2
    assert [name for name in begun if name.startswith("flood")] == sorted(begun)[:30]


@pytest.mark.parametrize(
    "asker", [{"waiting_per_host_max": 3, "waiting_max": 5}], indirect=True, ids=["few"]
)
async def test_the_queue_is_bounded_for_each_address_and_for_all(asker: Asker) -> None:
    for at in range(THREADS):
        asker.ask("a", f"running{at}")
    for at in range(4):
        asker.ask("a", f"a{at}")
    for at in range(3):
        asker.ask("b", f"b{at}")
    assert asker.refused == ["a a3", "b b2"]
    await asker.let_end(THREADS + 5)
    assert asker.told["a a3"] == asker.told["b b2"] == []
    asker.ask("a", "right")
    await asker.let_end()
    assert asker.told["a right"] == [True]


async def test_who_is_blocked_meanwhile_is_told_without_a_derivation(asker: Asker) -> None:
    for at in range(THREADS):
        asker.ask("h", f"running{at}")
    for at in range(10):
        asker.ask("h", f"waiting{at}")
    asker.ask("other", "right")
    asker.blocked.add("h")
    await asker.let_end(THREADS + 1)
    assert sorted(asker.derivations.begun) == ["right", *(f"running{at}" for at in range(THREADS))]
    assert [asker.told[f"h waiting{at}"] for at in range(10)] == [[None]] * 10
    assert asker.told["other right"] == [True]


async def test_equal_checks_of_an_address_are_one(asker: Asker) -> None:
    for at in range(THREADS):
        asker.ask("h", f"running{at}")
    for at in range(5):
        asker.ask("h", "running0", f"again {at}")
        asker.ask("h", "right", f"waiting {at}")
    asker.ask("other", "right")
    await asker.let_end(THREADS + 2)
    assert asker.derivations.begun.count("running0") == 1
    assert asker.derivations.begun.count("right") == 2, "another address does not wait for it"
    assert [asker.told[f"again {at}"] for at in range(5)] == [[False]] * 5
    assert [asker.told[f"waiting {at}"] for at in range(5)] == [[True]] * 5


async def test_check_nobody_waits_for_is_not_begun(asker: Asker) -> None:
    for at in range(THREADS):
        asker.ask("h", f"running{at}")
    asker.ask("h", "dropped")
    asker.ask("h", "right", "dropped too")
    asker.ask("h", "right", "stays")
    for name in ("h running0", "h dropped", "dropped too"):
        asker.checks.drop(asker.tickets[name])
        asker.checks.drop(asker.tickets[name])
    asker.derivations.may_end.release(THREADS + 1)
    async with asyncio.timeout(WAIT_S):
        while not asker.told["stays"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert "dropped" not in asker.derivations.begun
    assert asker.told["stays"] == [True]
    assert asker.told["h running0"] == asker.told["h dropped"] == asker.told["dropped too"] == []


async def test_a_dropped_check_does_not_take_an_equal_one_with_it(asker: Asker) -> None:
    for at in range(THREADS):
        asker.ask("h", f"running{at}")
    first = asker.tickets["h running0"]
    await asker.let_end(THREADS)
    for at in range(THREADS):
        asker.ask("h", f"more{at}")
    asker.ask("h", "running0", "again")
    asker.checks.drop(first)
    await asker.let_end(THREADS + 1)
    assert asker.told["again"] == [False]


async def test_a_derivation_that_fails_refuses_and_others_go_on(asker: Asker) -> None:
    failures: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    for at in range(THREADS):
        asker.ask("h", f"fails{at}")
    asker.ask("h", "right")
    await asker.let_end(THREADS + 1)
    assert asker.told == {
        **{f"h fails{at}": [False] for at in range(THREADS)},
        "h right": [True],
    }
    assert [type(failure) for failure in failures] == [MemoryError] * THREADS


async def test_after_the_end_nothing_is_begun(asker: Asker) -> None:
    for at in range(THREADS + 3):
        asker.ask("h", f"right{at}")
    closing = asyncio.ensure_future(asker.checks.close())
    await asyncio.sleep(0)
    asker.derivations.may_end.release(THREADS)
    await closing
    asker.ask("h", "late")
    assert asker.refused == ["h late"]
    assert len(asker.derivations.begun) == THREADS


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own there")
async def test_the_threads_let_others_go_first(asker: Asker) -> None:
    asker.ask("h", "right")
    async with asyncio.timeout(WAIT_S):
        while not asker.derivations.threads:  # noqa: ASYNC110
            await asyncio.sleep(0)
    (thread,) = asker.derivations.threads
    wanted = min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, NICENESS_MAX)
    assert os.getpriority(os.PRIO_PROCESS, thread) == wanted
    await asker.let_end()
