"""The cost of guessed passwords for clients that are logged in.

    python -m benchmarks.logins --seconds 10 --rate 300

It starts a server. A client sends a NOOP every millisecond, while another process sends wrong PLAIN
logins at a fixed rate. The output is one JSON document with a part for each kind of flood:

- quiet     no logins
- blocked   one user from one address: after login_failures_per_minute failures it is blocked
- spread    each login from another address: none is blocked, so passwords are always derived

Each part has `noop`, the time from sending a NOOP to its answer in milliseconds; `logins`, answers
a second by status; and `cores`, the server's processor time per second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from socket import create_connection, socket
from typing import Any, Final

from benchmarks import workload
from benchmarks.pauses import send_noops, summary
from benchmarks.peers import Dcpd
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

FLOODS: Final = ("quiet", "blocked", "spread")
GUESSERS: Final = 16
"""Connections that guess at the same time."""
LOGINS_PER_CONNECTION: Final = 5
"""After this many failures the server closes the connection (login_failures_max)."""


class Guesser(threading.Thread):
    """Sends its share of the logins, each at its time, and counts the answers."""

    def __init__(self, port: int, number: int, options: argparse.Namespace) -> None:
        super().__init__()
        self.statuses: Counter[str] = Counter()
        self._port, self._number = port, number
        self._is_spread = options.flood == "spread"
        self._interval = GUESSERS / options.rate
        self._end = time.perf_counter() + options.seconds
        self._sent = 0

    def run(self) -> None:
        due = time.perf_counter() + self._interval * self._number / GUESSERS
        while time.perf_counter() < self._end:
            with create_connection(
                ("127.0.0.1", self._port), timeout=30, source_address=(self._address(), 0)
            ) as connection:
                for _ in range(1 if self._is_spread else LOGINS_PER_CONNECTION):
                    time.sleep(max(0.0, due - time.perf_counter()))
                    if time.perf_counter() >= self._end:
                        return
                    self.statuses[self._guess(connection)] += 1
                    due += self._interval

    def _address(self) -> str:
        if not self._is_spread:
            return "127.0.0.2"
        place = self._sent * GUESSERS + self._number
        return f"127.1.{place // 250 % 250}.{place % 250 + 1}"

    def _guess(self, connection: socket) -> str:
        self._sent += 1
        password = b"guess-%d-%d" % (self._number, self._sent)
        connection.sendall(
            workload.frame(Opcode.SASL_AUTH, key=b"PLAIN", value=b"\0ada\0" + password)
        )
        head = b""
        while len(head) < 24:
            more = connection.recv(24 - len(head))
            if not more:
                return "closed"
            head += more
        body_bytes = int.from_bytes(head[8:12], "big")
        while body_bytes:
            body_bytes -= len(connection.recv(body_bytes))
        return Status(int.from_bytes(head[6:8], "big")).name


def guess(options: argparse.Namespace) -> None:
    """Run as the process that guesses."""
    guessers = [Guesser(options.port, number, options) for number in range(GUESSERS)]
    for guesser in guessers:
        guesser.start()
    statuses: Counter[str] = Counter()
    for guesser in guessers:
        guesser.join()
        statuses += guesser.statuses
    print(json.dumps({name: round(count / options.seconds, 1) for name, count in statuses.items()}))


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(folder: Path, flood: str, options: argparse.Namespace) -> dict[str, Any]:
    """Send NOOPs and logins at the same time, to a new server."""
    peer = Dcpd(folder / flood)
    peer.start()
    try:
        stop = threading.Event()
        found: dict[str, Any] = {}
        noops = threading.Thread(
            target=lambda: found.update(noop=summary(send_noops(peer.port, stop)))
        )
        noops.start()
        began, before = time.perf_counter(), processor_seconds(peer.pid)
        if flood == "quiet":
            time.sleep(options.seconds)
        else:
            done = subprocess.run(
                [
                    sys.executable, "-m", "benchmarks.logins", "--guess", "--flood", flood,
                    "--port", str(peer.port), "--seconds", str(options.seconds),
                    "--rate", str(options.rate),
                ],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            found["logins"] = json.loads(done.stdout)
        elapsed = time.perf_counter() - began
        found["cores"] = round((processor_seconds(peer.pid) - before) / elapsed, 3)
        stop.set()
        noops.join()
        return found
    finally:
        peer.discard()


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.logins")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rate", type=float, default=300)
    parser.add_argument("--flood", choices=FLOODS, help="only this one")
    parser.add_argument("--guess", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.guess:
        guess(options)
        return 0
    floods = [options.flood] if options.flood else FLOODS
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps({flood: measure(Path(folder), flood, options) for flood in floods}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
