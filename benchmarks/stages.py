"""Where a SET that is alone in a cluster of three nodes spends its time.

    python -m benchmarks.stages --seconds 15

One connection stores one document again and again. Each node samples where its loop stands
(`benchmarks/stage_sampler`), waits for the disk and for the processor included. The table has the
milliseconds of a SET in each stage, at the partition's master and at a replica; stages of the two
overlap.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

from clients import SyncKv, vbucket_of
from clients.testing import DcpCluster

STAGES: Final = (
    ("packets of the client and of replicas, taken", "dcp.session.session:Session.receive"),
    ("the group, sent to replicas", "dcp.server.net.after_commit:AfterCommit.begun"),
    ("messages of the master, applied", "failover.replication.link:ReplicaLink.receive"),
    ("the log's append", "vbucket.log.writer:LogWriter.append"),
    ("the log's sync", "vbucket.log.device_files:FileLogDevice.sync"),
    (
        "what is told when a group is on disk: acknowledgements",
        "dcp.server.net.after_commit:AfterCommit.published",
    ),
    ("answers, sent", "dcp.server.net.connections:Connections.release"),
    ("the log's end mark", "vbucket.log.writer:LogWriter.mark_end"),
)
"""What a stage is, and the function that has it: MODULE:CLASS.METHOD."""
PARTITIONS: Final = 64
VB: Final = 0
WARM_S: Final = 3.0


def sampled_name(function: str) -> str:
    """Return how the sampler names a function: FILE.NAME. One that was renamed would count as 0 ms
    for ever, so it ends the benchmark.
    """
    module, _, path = function.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if found is None:
        raise SystemExit(
            f"benchmarks.stages: there is no {path} in {module}: STAGES has an old name. Correct it"
        )
    return f"{module.rpartition('.')[2]}.{path.rpartition('.')[2]}"


def _sampled(folder: Path, pid: int) -> dict[str, Any]:
    """Return the counts of a node's samples, and when they were written."""
    time.sleep(1.5)  # they are written once a second
    found: dict[str, Any] = json.loads((folder / f"{pid}.json").read_text())
    return found


def measure(folder: Path, seconds: float) -> None:
    """Print the table."""
    stages = [(what, sampled_name(function)) for what, function in STAGES]
    with DcpCluster("--partitions", str(PARTITIONS)) as cluster:
        master = cluster.masters()[VB]
        assert master is not None, "the copies are in sync"
        nodes = master, next(name for name in cluster.nodes if name != master)
        pids = [cluster.nodes[name].pid for name in nodes]
        with SyncKv(cluster.nodes[master].address) as kv:
            key = next(key for key in map(str, range(10_000)) if _vb_of(key) == VB)
            _store(kv, key, WARM_S)
            before = [_sampled(folder, pid) for pid in pids]
            took_ms = _store(kv, key, seconds)
            after = [_sampled(folder, pid) for pid in pids]
    load = os.getloadavg()[0]
    print(f"{len(took_ms)} SETs, p50 {statistics.median(took_ms):.2f} ms, at a load of {load:.1f}")
    print(f"{'ms of a SET':<56}{'master':>8}{'replica':>9}")
    for what, function in stages:
        each = [_ms(*pair, function) / len(took_ms) for pair in zip(before, after, strict=True)]
        print(f"{what:<56}{each[0]:>8.3f}{each[1]:>9.3f}")


def _vb_of(key: str) -> int:
    return vbucket_of(key.encode(), PARTITIONS)


def _ms(before: dict[str, Any], after: dict[str, Any], function: str) -> float:
    """Return for how long a function stood in the stack."""
    was, is_now = Counter(before["counts"]), Counter(after["counts"])
    share = (is_now[function] - was[function]) / (is_now["samples"] - was["samples"])
    took_s: float = after["at_s"] - before["at_s"]
    return share * took_s * 1e3


def _store(kv: SyncKv, key: str, seconds: float) -> list[float]:
    """Store a document again and again; return how long each SET took, in milliseconds."""
    took_ms = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.perf_counter()
        kv.set(key, bytes(128))
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    return took_ms


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=15.0)
    seconds: float = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STAGES_FOLDER"] = folder
        os.environ["PYTHONPATH"] = str(Path(__file__).parent / "stage_sampler")
        measure(Path(folder), seconds)


if __name__ == "__main__":
    main()
