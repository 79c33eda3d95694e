"""Look-ups into a large array, and how long another client's GETs take meanwhile.

    python -m benchmarks.subdoc_large --mib 20 --lookups 20

One client asks for 16 elements of an array with one digit each, the most elements that there can
be, one request after the other. Another one sends GETs of a small document. The output is one JSON
document:

- lookup_ms       of the requests: median and maximum
- lookup_cpu_ms   processor time of the server for one, which is the same on a busy machine
- get_ms          of the GETs meanwhile: median, 99th percentile, maximum
- alone_ms        the same without look-ups
- lookup_mib      the most memory that the server took beyond what it had before the first look-up
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from benchmarks.generator import open_session
from benchmarks.peers import Dcpd
from clients.cli.node.histogram import Histogram
from dcp.wire.feature import Feature
from dcp.wire.frame import HEADER_BYTES, pack_request
from dcp.wire.opcode import Opcode
from vbucket.model.ids import vbucket_of

PATHS: Final = 16
PAUSE_S: Final = 0.0005
"""Between two GETs."""
ALONE_S: Final = 2.0


class Client:
    """One connection that waits for each answer."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        open_session(self._socket, (Feature.XERROR, Feature.JSON))
        self._stream = self._socket.makefile("rb")

    def ask(self, opcode: int, key: bytes, value: bytes = b"", extras: bytes = b"") -> bytes:
        """Send a request; return the answer's value. Raises RuntimeError if it is refused."""
        vb_id = vbucket_of(key)
        self._socket.sendall(pack_request(opcode, vb_id=vb_id, key=key, value=value, extras=extras))
        head = self._stream.read(HEADER_BYTES)
        body: bytes = self._stream.read(int.from_bytes(head[8:12], "big"))
        if head[6:8] != b"\0\0":
            raise RuntimeError(f"status 0x{head[6:8].hex()}: {body[:100]!r}")
        return body[head[4] :]


class Getter(threading.Thread):
    """Sends GETs until it is stopped."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._client = Client(port)
        self._client.ask(Opcode.SET, b"small", b'{"n":1}', bytes(8))
        self._is_over = threading.Event()
        self.times = Histogram()

    def run(self) -> None:
        while not self._is_over.wait(PAUSE_S):
            began = time.perf_counter()
            self._client.ask(Opcode.GET, b"small")
            self.times.add(int((time.perf_counter() - began) * 1e6))

    def stop(self) -> dict[str, float]:
        """Return the percentiles, in milliseconds."""
        self._is_over.set()
        self.join()
        wanted = {"p50": 50, "p99": 99, "max": 100}
        return {name: round(self.times.percentile(at) / 1000, 2) for name, at in wanted.items()}


def status_kib(pid: int, name: str) -> int:
    """Return a figure of the process, in KiB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith(name)))


def cpu_s(pid: int) -> float:
    """Return the processor time of the process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def measure(server: Dcpd, mib: int, lookups: int) -> dict[str, object]:
    """Everything."""
    client = Client(server.port)
    elements = mib << 19
    client.ask(Opcode.SET, b"large", b"[" + b"1," * (elements - 9) + b"1]", bytes(8))
    alone = Getter(server.port)
    alone.start()
    time.sleep(ALONE_S)
    alone_ms = alone.stop()
    paths = [b"[%d]" % (at * elements // PATHS) for at in range(PATHS - 1)] + [b"[-1]"]
    asked = b"".join(struct.pack(">BBH", Opcode.SUBDOC_GET, 0, len(path)) + path for path in paths)
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak begins anew
    before_kib = status_kib(server.pid, "VmRSS")
    getter = Getter(server.port)
    getter.start()
    times, began_cpu_s = [], cpu_s(server.pid)
    for _ in range(lookups):
        began = time.perf_counter()
        found = client.ask(Opcode.SUBDOC_MULTI_LOOKUP, b"large", asked)
        times.append((time.perf_counter() - began) * 1000)
        if found != (bytes(5) + b"\x01" + b"1") * PATHS:
            raise RuntimeError(f"another answer than expected: {found[:100]!r}")
    used_s = cpu_s(server.pid) - began_cpu_s
    get_ms = getter.stop()
    return {
        "lookup_ms": {"p50": round(statistics.median(times), 1), "max": round(max(times), 1)},
        "lookup_cpu_ms": round(used_s / lookups * 1000, 1),
        "get_ms": get_ms,
        "alone_ms": alone_ms,
        "lookup_mib": round((status_kib(server.pid, "VmHWM") - before_kib) / 1024, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.subdoc_large")
    parser.add_argument("--mib", type=int, default=20)
    parser.add_argument("--lookups", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Dcpd(Path(folder) / "data")
        server.start()
        try:
            print(json.dumps(measure(server, options.mib, options.lookups)))
        finally:
            server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
