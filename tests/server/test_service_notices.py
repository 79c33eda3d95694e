"""Notices to a service manager: ready, alive, stopping."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp.server.observe.service_notices import ServiceNotices
from support.server import DcpdProcess

GIVE_UP_S = 30.0
PERIOD_US = "20000"


class Receiver:
    """What a service manager listens on."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(GIVE_UP_S)
        self.socket.bind(address)

    def next(self) -> list[str]:
        return self.socket.recv(4096).decode().splitlines()

    def next_but_alive(self) -> list[str]:
        """The next notice that is not about the watchdog."""
        while (found := self.next()) == ["WATCHDOG=1"]:
            pass
        return found


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    receiver = Receiver(str(tmp_path / "notify"))
    yield receiver
    receiver.socket.close()


def test_a_server_says_that_it_is_ready_alive_and_stopping(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", PERIOD_US)
    with DcpdProcess(tmp_path / "data") as server:
        ready, status = receiver.next()
        assert (ready, str(tmp_path / "data") in status) == ("READY=1", True)
        assert [receiver.next() for _ in range(3)] == [["WATCHDOG=1"]] * 3
        # The store process gets no variables that it could use.
        (child,) = server.children()
        assert b"NOTIFY_SOCKET" not in Path(f"/proc/{child}/environ").read_bytes()
        server.stop()
        assert receiver.next_but_alive() == ["STOPPING=1", "STATUS=stopping"]


def test_a_loop_that_hangs_sends_nothing(tmp_path: Path, receiver: Receiver) -> None:
    notices = ServiceNotices(
        {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": PERIOD_US}, os.getpid()
    )
    silence: list[bool] = []

    def hang() -> None:
        """Receive on the loop's own thread: what arrives meanwhile came from elsewhere."""
        receiver.socket.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                receiver.socket.recv(4096)
        receiver.socket.settimeout(10 * notices.watchdog_s)
        try:
            receiver.socket.recv(4096)
        except TimeoutError:
            silence.append(True)
        receiver.socket.settimeout(GIVE_UP_S)

    async def run() -> None:
        alive = asyncio.create_task(notices.keep_alive())
        loop = asyncio.get_running_loop()
        assert await loop.run_in_executor(None, receiver.next) == ["WATCHDOG=1"]
        hang()
        assert await loop.run_in_executor(None, receiver.next) == ["WATCHDOG=1"]
        alive.cancel()

    asyncio.run(run())
    assert silence == [True]


@pytest.mark.parametrize(
    ("env", "period_s"),
    [
        ({}, 0),
        ({"WATCHDOG_USEC": "1000000"}, 0),
        ({"NOTIFY_SOCKET": "/nowhere"}, 0),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1500000"}, 1.5),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "7"}, 1.5),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "8"}, 0),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "soon"}, 0),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "9" * 5000}, 0),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "1"}, 0.1),
        ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "0"}, 0),
    ],
)
def test_when_there_is_a_watchdog(env: dict[str, str], period_s: float) -> None:
    notices = ServiceNotices(env, 7)
    assert notices.watchdog_s == period_s
    notices.ready("nobody listens")  # which is no error
    notices.stopping()


def test_an_abstract_socket() -> None:
    name = f"dcpd-test-{os.getpid()}"
    receiver = Receiver("\0" + name)
    ServiceNotices({"NOTIFY_SOCKET": "@" + name}, 7).stopping()
    assert receiver.next()[0] == "STOPPING=1"
    receiver.socket.close()
