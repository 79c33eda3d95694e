"""Members of an etcd as processes: Debian's etcd 3.4, or whatever `etcd` is."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from dcp.server.net.fixed_port import free_port
from support.waiting import until

IS_MISSING = shutil.which("etcd") is None


def free_ports(count: int) -> list[int]:
    """Return distinct ports that nobody listens on, and that no outgoing connection is given."""
    draw, found = random.SystemRandom(), set[int]()
    while len(found) < count:
        port = free_port("127.0.0.1", draw)
        assert port is not None, "no free port"
        found.add(port)
    return list(found)


class EtcdMembers:
    """One or several members on loopback. Nothing is synced: tests cut no power."""

    def __init__(self, folder: Path, count: int = 1, options: tuple[str, ...] = ()) -> None:
        if IS_MISSING:
            pytest.skip("the command etcd is missing (sudo apt-get install etcd-server)")
        self.folder = folder
        # One member needs no patience with others, and starts sooner.
        heartbeat_ms, election_ms = ("10", "100") if count == 1 else ("50", "500")
        timing = ("--heartbeat-interval", heartbeat_ms, "--election-timeout", election_ms)
        self.options = (*timing, *options)
        self.scheme = "https" if "--cert-file" in options else "http"
        ports = free_ports(3 * count)
        self.ports, self.peer_ports, self.health_ports = (
            ports[:count], ports[count : 2 * count], ports[2 * count :],
        )  # fmt: skip
        self.processes: list[subprocess.Popen | None] = [None] * count
        try:
            for number in range(count):
                self.start(number)
            for number in range(count):
                self.wait_until_ready(number)
        except BaseException:
            self.close()
            raise

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        cluster = ",".join(
            f"m{other}=http://127.0.0.1:{port}" for other, port in enumerate(self.peer_ports)
        )
        client = f"{self.scheme}://127.0.0.1:{self.ports[number]}"
        peer = f"http://127.0.0.1:{self.peer_ports[number]}"
        with (self.folder / f"m{number}.log").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                [
                    "etcd", "--name", f"m{number}", "--data-dir", self.folder / f"m{number}",
                    "--listen-client-urls", client, "--advertise-client-urls", client,
                    "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                    "--initial-cluster", cluster, "--logger", "zap", "--unsafe-no-fsync",
                    "--listen-metrics-urls", f"http://127.0.0.1:{self.health_ports[number]}",
                    *self.options,
                ],
                stdout=log, stderr=log,
            )  # fmt: skip

    def wait_until_ready(self, number: int) -> None:
        """Wait until a member has a leader."""

        def is_ready() -> bool:
            if self.processes[number].poll() is not None:
                log = (self.folder / f"m{number}.log").read_text(errors="replace")
                raise AssertionError(f"etcd has ended; its log ends with {log[-1000:]}")
            try:
                url = f"http://127.0.0.1:{self.health_ports[number]}/health"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    return b"true" in answer.read()
            except OSError:
                return False

        until(is_ready)

    def signal(self, number: int, which: signal.Signals) -> None:
        self.processes[number].send_signal(which)

    def kill(self, number: int) -> None:
        process = self.processes[number]
        if process is not None:
            process.kill()
            process.wait()
            self.processes[number] = None

    def close(self) -> None:
        for number in range(len(self.processes)):
            self.kill(number)

    def leader(self) -> int:
        """Return which member leads, as the members that run say in their metrics."""
        found: list[int] = []

        def is_found() -> bool:
            for number, process in enumerate(self.processes):
                if process is None:
                    continue
                url = f"http://127.0.0.1:{self.health_ports[number]}/metrics"
                with urllib.request.urlopen(url, timeout=5) as answer:
                    if b"\netcd_server_is_leader 1" in answer.read():
                        found.append(number)
            return bool(found)

        until(is_found)
        return found[-1]
