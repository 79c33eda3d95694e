"""The servers that are measured: ours and its peers, each with its own process and folder.

These keep what they answer: dcpd with its default (`--durability commit`), Redis with `appendonly
yes, appendfsync always` and no snapshots, and etcd. NATS JetStream does not sync by default. All
folders are on the same file system. A peer is started, measured, killed with SIGKILL and started
again. Its folder stays until `discard`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final

from benchmarks import etcd, nats, workload
from benchmarks.generator import open_session
from clients.cli.node.answers import AnswerError

KEY_VALUE_PORT: Final = re.compile(r"key-value\D*127\.0\.0\.1:(\d+)")
"""Where dcpd's first lines name its port."""
READY_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.001
SECTOR_BYTES: Final = 512
"""The unit of a disk's counters, whatever its sectors are."""
SECTORS_WRITTEN: Final = 6
"""Which of these counters it is."""


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 on which nothing listens."""
    with ExitStack() as listening:
        found = [
            listening.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [int(listener.getsockname()[1]) for listener in found]


class PeerError(Exception):
    """A server did not start or did not answer; the text has its output."""


class Peer:
    """One server process. `protocol` is the generator's protocol for it."""

    name = ""
    protocol = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._output = folder.with_name(f"{folder.name}.out")

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} is not running"
        return self._process.pid

    def start(self) -> float:
        """Start the server; return the seconds until it answered a GET."""
        self.folder.mkdir(parents=True, exist_ok=True)
        assert self._process is None, f"{self.name} is running"
        with self._output.open("wb") as output:
            began = time.perf_counter()
            self._process = subprocess.Popen(
                self.command(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait_until_it_answers(began + READY_SECONDS)
        except PeerError:
            self.kill()
            raise
        return time.perf_counter() - began

    def _wait_until_it_answers(self, deadline: float) -> None:
        assert self._process is not None
        reason: object = "it did not print its port"
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                raise PeerError(
                    f"{self.name} ended with exit code {self._process.returncode}: {self.printed()}"
                )
            self.port = self.find_port()
            if self.port:
                try:
                    self.get(workload.key_of(0))
                except (OSError, AnswerError) as error:
                    reason = error
                else:
                    return
            time.sleep(POLL_SECONDS)
        raise PeerError(f"{self.name} was not ready in {READY_SECONDS:.0f} s ({reason}): "
                        f"{self.printed()}")  # fmt: skip

    def kill(self) -> None:
        """Kill the server and its descendants with SIGKILL."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def discard(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._output.unlink(missing_ok=True)

    def printed(self) -> str:
        """The end of the server's output."""
        if not self._output.exists():
            return ""
        return self._output.read_text(errors="replace")[-2000:]

    def command(self) -> list[str]:
        """The command line."""
        raise NotImplementedError

    def find_port(self) -> int:
        """The port it listens on, 0 if not known yet."""
        raise NotImplementedError

    def get(self, key: bytes) -> bytes | None:
        """Read one document over a new connection; None if it does not exist."""
        raise NotImplementedError


class Dcpd(Peer):
    """Our server."""

    name = "dcpd"
    protocol = "binary"

    def command(self) -> list[str]:
        program = Path(sys.executable).with_name("dcpd")
        return [str(program), "--port", "0", "--admin-port", "0", "--data", str(self.folder)]

    def find_port(self) -> int:
        found = KEY_VALUE_PORT.search(self.printed())
        return int(found[1]) if found else 0

    def get(self, key: bytes) -> bytes | None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            open_session(connection)
            connection.sendall(workload.binary_get(key))
            stream = connection.makefile("rb")
            with stream:
                head = _read(stream, 24)
                body = _read(stream, int.from_bytes(head[8:12], "big"))
        status = int.from_bytes(head[6:8], "big")
        if status not in {0, 1}:
            raise AnswerError(f"GET was answered with status 0x{status:02x}")
        return body[head[4] :] if status == 0 else None


class DcpdForMemcached(Dcpd):
    """Our server, and clients that say no HELLO: pylibmc, libmemcached and the like."""

    name = "dcpd-memcached"
    protocol = "memcached"


class ColdDcpd(Dcpd):
    """Our server with hardly anything in memory, so GETs read the store."""

    def command(self) -> list[str]:
        return [*super().command(), "--item-cache-bytes", "0", "--memtable-bytes", "1MiB"]


class PeerOfChosenPort(Peer):
    """A server with a port that we choose: it picks no free port, or does not print it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._chosen = 0

    def find_port(self) -> int:
        return self._chosen


class Redis(PeerOfChosenPort):
    """redis-server, as its distribution packages it."""

    name = "redis"
    protocol = "resp"

    def command(self) -> list[str]:
        (self._chosen,) = free_ports(1)
        return [
            "redis-server", "--bind", "127.0.0.1", "--port", str(self._chosen),
            "--appendonly", "yes", "--appendfsync", "always", "--save", "",
            "--daemonize", "no", "--dir", str(self.folder),
        ]  # fmt: skip

    def get(self, key: bytes) -> bytes | None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(workload.resp_command(b"GET", key))
            with connection.makefile("rb") as stream:
                line = stream.readline()
                if not line.startswith(b"$"):  # -LOADING while it reads its log
                    raise AnswerError(f"GET was answered with {line!r}")
                count = int(line[1:])
                return _read(stream, count) if count >= 0 else None


class Memcached(PeerOfChosenPort):
    """memcached. It keeps everything in memory, so it is none of PEERS."""

    name = "memcached"
    protocol = "memcached"

    def command(self) -> list[str]:
        (self._chosen,) = free_ports(1)
        return [
            "memcached", "-l", "127.0.0.1", "-p", str(self._chosen), "-U", "0", "-u", "nobody",
            "-m", "4096", "-I", "64m", "-c", "16000",
        ]  # fmt: skip

    def get(self, key: bytes) -> bytes | None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            connection.sendall(workload.text_get(key))
            with connection.makefile("rb") as stream:
                line = stream.readline()
                if line == b"END\r\n":
                    return None
                return _read(stream, int(line.split()[3]))


class BoundedRedis(Redis):
    """redis-server whose streams keep only their newest entries; otherwise memory runs out."""

    name = "redis-bounded"
    protocol = "resp-bounded"


class Etcd(PeerOfChosenPort):
    """etcd, one member, as its distribution packages it."""

    name = "etcd"
    protocol = "etcd"

    def command(self) -> list[str]:
        self._chosen, peer_port = free_ports(2)
        return etcd.command(self.folder, self._chosen, {"default": peer_port}, "default")

    def get(self, key: bytes) -> bytes | None:
        return etcd.get(self.port, key)


class Nats(PeerOfChosenPort):
    """nats-server with a JetStream key-value bucket, as its distribution packages it."""

    name = "nats"
    protocol = "nats"

    def command(self) -> list[str]:
        (self._chosen,) = free_ports(1)
        return nats.command(self.folder, self._chosen)

    def get(self, key: bytes) -> bytes | None:
        return nats.get(self.port, key)


def _read(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise AnswerError("the server closed the connection")
    return data


def descendants(pid: int) -> list[int]:
    """A process and its descendants, found through /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it ended meanwhile
        parent = int(text.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for known in found:
        found.extend(children.get(known, []))
    return found


def cpu_seconds(pid: int) -> float:
    """Processor seconds of a process and its descendants."""
    total = 0
    for process in descendants(pid):
        with suppress(OSError):  # it ended meanwhile
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def memory_bytes(pid: int) -> dict[str, int]:
    """Rss, Pss and Anonymous of a process and its descendants, in bytes."""
    total = {"Rss": 0, "Pss": 0, "Anonymous": 0}
    for process in descendants(pid):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines[1:]:
            name, _, rest = line.partition(":")
            if name in total:
                total[name] += int(rest.split()[0]) * 1024
    return total


def disk_written_bytes(folder: Path) -> int | None:
    """Bytes that the disk of a folder was sent since the system's start, by all programs; None:
    its file system has no disk of its own.

    The counters of a process (`write_bytes` in /proc/PID/io) say more: Linux counts a page cache
    folio as a whole, up to 2 MiB, when 4 KiB of it change.
    """
    device = folder.stat().st_dev
    path = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    if not path.exists():
        return None
    return SECTOR_BYTES * int(path.read_text().split()[SECTORS_WRITTEN])


def folder_bytes(folder: Path) -> int:
    """The disk space of a folder."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # rotated away meanwhile
    return total


PEERS: Final[dict[str, type[Peer]]] = {
    "dcpd": Dcpd,
    "dcpd-memcached": DcpdForMemcached,
    "redis": Redis,
    "redis-bounded": BoundedRedis,
    "nats": Nats,
    "etcd": Etcd,
}
