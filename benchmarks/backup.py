"""Backup and restore beside the raw stream, on one machine.

    python -m benchmarks.backup                       a million documents, three rounds
    python -m benchmarks.backup --documents 10000000 --rounds 1

The raw stream uses the same connection, requests and decoding, but discards the changes. It is the
upper limit for a Python consumer. Each round runs the raw stream, a backup into a new archive, and
a restore into an empty server. Each has its own process, so memory figures are separate. The output
is a table and one JSON document. It has rates, and microseconds of CPU per change: of the client,
of the server with all its threads, and of the server's store process (which may still merge after
the restore). CPU times are more stable than rates on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.workload import batches, session_frames, values
from clients.address import parse_address
from clients.testing import DcpServer
from vbucket.model.ids import NUM_VBUCKETS

LOAD_BATCH = 2000


def load(port: int, documents: int, value_bytes: int) -> None:
    """Write documents; return when all are answered."""
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(b"".join(session_frames()))

        def drain() -> None:
            while link.recv(1 << 20):
                pass

        reader = threading.Thread(target=drain)
        reader.start()
        for batch in batches("binary", range(documents), LOAD_BATCH, values(1, value_bytes)):
            link.sendall(batch)
        link.shutdown(socket.SHUT_WR)
        reader.join()


async def raw(server: str, history: bool) -> dict[str, Any]:
    """Count all changes."""
    from clients.backup.feed import Feed
    from clients.backup.intake import Intake
    from clients.backup.run import PUSH_FEATURES
    from clients.link.pipelined_link import Link

    began, began_cpu = time.perf_counter(), time.process_time()
    link = await Link.connect(parse_address(server), features=PUSH_FEATURES)
    intake = Intake(b"raw", history=history)
    for vb_id in range(NUM_VBUCKETS):
        intake.add(Feed(vb_id, 1, [], []))
    done = asyncio.Event()
    changes = 0

    def take(data: bytes) -> None:
        nonlocal changes
        intake.receive(data, 0)
        changes += sum(piece.changes for piece in intake.take_pieces())
        output = intake.take_output()
        if output:
            link.write(output)
        if len(intake.finished) == NUM_VBUCKETS:
            done.set()

    link.write(intake.begin())
    link.hand_over(take, lambda _error: done.set())
    await done.wait()
    link.close()
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - began_cpu
    return {"changes": changes, "seconds": seconds, "client_cpu": cpu_seconds}


async def backup(server: str, archive: str, history: bool) -> dict[str, Any]:
    """One full run."""
    from clients.backup.archives.archive import create_archive
    from clients.backup.run import Backup, BackupOptions

    began = time.process_time()
    made = create_archive(archive, time.time_ns())
    report = await Backup(made, parse_address(server), BackupOptions(history=history)).run()
    record = report.record
    return {
        "changes": record.changes, "seconds": report.seconds, "raw_bytes": record.raw_bytes,
        "stored_bytes": record.stored_bytes, "client_cpu": time.process_time() - began,
    }  # fmt: skip


async def restore(server: str, archive: str) -> dict[str, Any]:
    """Everything, into an empty server."""
    from clients.backup.archives.archive import open_archive
    from clients.backup.archives.point import Point
    from clients.backup.restore import Restore
    from clients.backup.selection import Selection

    began = time.process_time()
    work = Restore(open_archive(archive), Point(), Selection())
    report = await work.run(parse_address(server))
    assert report.written == report.plan.documents, report
    return {
        "changes": report.written, "seconds": report.seconds,
        "client_cpu": time.process_time() - began,
    }  # fmt: skip


def step(server: DcpServer, name: str, *arguments: str) -> dict[str, Any]:
    """Run one of the above in its own process; return its result, its memory, and the processor
    time of each side per change.
    """
    before = cpu_seconds(server.pid)
    command = [sys.executable, "-m", "benchmarks.backup", "--step", name, *arguments]
    command += ["--server", server.address]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    document: dict[str, Any] = json.loads(done.stdout)
    changes = document["changes"]
    document["rate"] = changes / document["seconds"]
    document["cpu_us"] = {"client": document["client_cpu"] / changes * 1e6}
    for side, seconds in cpu_seconds(server.pid).items():
        document["cpu_us"][side] = (seconds - before[side]) / changes * 1e6
    return document


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU time of a server, and of the store process that it started."""
    found = {"server": 0.0, "store": 0.0}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            if int(path.parent.name) == pid:
                found["server"] += seconds
            elif int(fields[1]) == pid:
                found["store"] += seconds
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; medians."""
    folder = Path(tempfile.mkdtemp(prefix="dcpd-backup-", dir=options.folder))
    history = [] if options.newest_only else ["--history"]
    rounds: dict[str, list[dict[str, Any]]] = {"raw": [], "backup": [], "restore": []}
    try:
        with DcpServer(folder / "source") as source:
            load(source.port, options.documents, options.value_bytes)
            for number in range(options.rounds):
                archive = str(folder / f"archive{number}")
                rounds["raw"].append(step(source, "raw", *history))
                rounds["backup"].append(step(source, "backup", "--archive", archive, *history))
        for number in range(options.rounds):
            archive = str(folder / f"archive{number}")
            with DcpServer(folder / f"target{number}") as target:
                rounds["restore"].append(step(target, "restore", "--archive", archive))
            shutil.rmtree(folder / f"target{number}")
    finally:
        shutil.rmtree(folder)
    rates = {
        name: statistics.median(item["rate"] for item in items) for name, items in rounds.items()
    }
    last = rounds["backup"][-1]
    return {
        "documents": options.documents, "value_bytes": options.value_bytes,
        "rounds": options.rounds, "history": bool(history),
        "rate": {name: round(rate) for name, rate in rates.items()},
        "backup_to_raw": round(rates["backup"] / rates["raw"], 3),
        "restore_to_raw": round(rates["restore"] / rates["raw"], 3),
        "stored_to_raw_bytes": round(last["stored_bytes"] / last["raw_bytes"], 3),
        "cpu_us": {
            name: {
                side: round(statistics.median(item["cpu_us"][side] for item in items), 2)
                for side in ("client", "server", "store")
            }
            for name, items in rounds.items()
        },
        "memory_mib": {
            name: max(item["memory_mib"] for item in items) for name, items in rounds.items()
        },
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.backup")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--value-bytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--newest-only", action="store_true", help="De-duplicated streams.")
    parser.add_argument("--folder", help="Where to put data; a temporary folder by default.")
    parser.add_argument("--step", choices=["raw", "backup", "restore"], help=argparse.SUPPRESS)
    parser.add_argument("--server", help=argparse.SUPPRESS)
    parser.add_argument("--archive", help=argparse.SUPPRESS)
    parser.add_argument("--history", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step is None:
        result = measure(options)
        for name, rate in result["rate"].items():
            cpu = ", ".join(f"{side} {us:.2f} us" for side, us in result["cpu_us"][name].items())
            print(f"{name:<8} {rate:>10,} changes/s {result['memory_mib'][name]:>5} MiB   {cpu}")
        print(json.dumps(result))
        return 0
    if options.step == "raw":
        found = asyncio.run(raw(options.server, options.history))
    elif options.step == "backup":
        found = asyncio.run(backup(options.server, options.archive, options.history))
    else:
        found = asyncio.run(restore(options.server, options.archive))
    memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**found, "memory_mib": memory_kib // 1024}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
