"""The probe: a well-behaved client that measures how long its requests stay unanswered.

It is a separate process (`python -m tests.soak.attack.probe`), so that load in the attack's process
does not count. Three connections send one request after another:

    read     a GET of a known key
    noop     a NOOP
    livez    GET /livez, on a new connection each time

`Probe` is the attack's side: `watch` begins to measure a server; `rest` ends that before the server
is stopped on purpose, and returns the figures. Meanwhile a refused or cut connection counts as
trouble, and so does a wrong value.

    line to the probe     {"watch": [...]} or {"rest": true}
    line from the probe   {"worst_s": {name: seconds}, "troubles": [text, ...]}
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from dcp.wire.opcode import Opcode
from support.raw_client import RawClient
from vbucket.model.ids import vbucket_of

ROOT: Final = Path(__file__).resolve().parents[3]
PAUSE_S: Final = 0.01
"""Pause between an answer and the next request."""
SETTLE_S: Final = 0.5
"""How long a pending request may take at the end; then the time so far counts."""
REPLY_S: Final = 60.0
TROUBLES_MAX: Final = 20
LIVEZ: Final = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
NAMES: Final = ("read", "noop", "livez")
CONNECT_PAUSE_S: Final = 0.05
WRONG: Final = "a wrong answer to GET"
"""The text of a trouble begins so if it is a wrong answer."""


class Measured(NamedTuple):
    """The longest times without an answer, and what went wrong."""

    worst_s: dict[str, float]
    troubles: list[str]


NOTHING: Final = Measured(dict.fromkeys(NAMES, 0.0), [])


class Watched(NamedTuple):
    """A server, and the key, user and password of the probe. `value` None: any answer is right."""

    port: int
    admin_port: int
    key: str = "probe"
    value: str | None = None
    user: str = ""
    password: str = ""


class Probe:
    """See the module. A context manager."""

    def __init__(self) -> None:
        path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.attack.probe"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        self._is_watching = False

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def watch(self, watched: Watched) -> None:
        """Begin to measure a server, which must stay up until `rest`."""
        self.rest()
        self._say({"watch": watched})
        self._is_watching = True

    def rest(self) -> Measured:
        """Stop, and return the figures since `watch`."""
        if not self._is_watching:
            return NOTHING
        self._is_watching = False
        self._say({"rest": True})
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], REPLY_S)[0], "the probe is gone"
        found = json.loads(self._process.stdout.readline())
        return Measured(found["worst_s"], found["troubles"])

    def _say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()


# -- the process -----------------------------------------------------------------------------------


class Asker(threading.Thread):
    """Sends one request repeatedly until it is stopped."""

    def __init__(self, name: str, ask: Callable[[Asker], str]) -> None:
        super().__init__(name=name, daemon=True)
        self.worst_s = 0.0
        self.troubles: Counter[str] = Counter()
        self.client: RawClient | None = None
        self._ask = ask
        self._since_s = 0.0
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.is_set():
            self._since_s = time.monotonic()
            try:
                trouble = self._ask(self)
            except (OSError, AssertionError) as error:
                trouble = f"{type(error).__name__}: {error}"
                if self.client is not None:
                    self.client.__exit__(None, None, None)
                self.client = None
            if self._is_over.is_set() and time.monotonic() - self._since_s > SETTLE_S:
                return  # it was counted before it was cut off
            self.worst_s = max(self.worst_s, time.monotonic() - self._since_s)
            self._since_s = 0.0
            if trouble and len(self.troubles) < TROUBLES_MAX:
                self.troubles[f"{self.name}: {trouble}"[:300]] += 1
            self._is_over.wait(CONNECT_PAUSE_S if trouble else PAUSE_S)

    def stop(self) -> None:
        """Stop; the time of a pending request so far counts."""
        self._is_over.set()
        self.join(SETTLE_S)
        if since_s := self._since_s:
            self.worst_s = max(self.worst_s, time.monotonic() - since_s)


def asks(watched: Watched) -> dict[str, Callable[[Asker], str]]:
    """Return the requests by name. Each function returns what is wrong with its answer."""
    key = watched.key.encode()

    def client_of(asker: Asker) -> RawClient:
        if asker.client is None:
            asker.client = RawClient(watched.port, watched.user, watched.password)
        return asker.client

    def read(asker: Asker) -> str:
        frame = client_of(asker).ask(Opcode.GET, key=key, vb_id=vbucket_of(key))
        if watched.value is None or (not frame.status and frame.value == watched.value.encode()):
            return ""
        return f"{WRONG}: {frame}"

    def noop(asker: Asker) -> str:
        frame = client_of(asker).ask(Opcode.NOOP)
        return f"NOOP was {frame}" if frame.status else ""

    def livez(_asker: Asker) -> str:
        with socket.create_connection(("127.0.0.1", watched.admin_port), 20.0) as connection:
            connection.sendall(
                b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )
            answer = b""
            while data := connection.recv(4096):
                answer += data
        return "" if answer.startswith(b"HTTP/1.1 200 ") else f"/livez was {answer[:200]!r}"

    return {"read": read, "noop": noop, "livez": livez}


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the attack
    askers: list[Asker] = []
    for line in sys.stdin:
        message = json.loads(line)
        if "watch" in message:
            askers = [Asker(*item) for item in asks(Watched(*message["watch"])).items()]
            for asker in askers:
                asker.start()
            continue
        for asker in askers:
            asker.stop()
        troubles: Counter[str] = sum((asker.troubles for asker in askers), Counter())
        worst_s = {asker.name: round(asker.worst_s, 4) for asker in askers}
        texts = [f"{text} ({count} times)" for text, count in troubles.items()]
        print(json.dumps({"worst_s": worst_s, "troubles": texts}), flush=True)
        askers = []


if __name__ == "__main__":
    main()
