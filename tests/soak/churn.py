"""Writes the same keys again and again. Does the store stay small, and memory constant?

    scripts/soak churn                    100 million writes over a million keys
    scripts/soak churn --writes 5000000 --keys 250000 --history-bytes 512MiB

It runs a real server in a folder that is kept. Every ten seconds it prints a line: writes, rate,
the store's file beside the size of the live documents, the log, and the memory of both processes. A
run fails if the store takes more than three times the live data and the history window, if the log
takes more than LOG_BYTES_MAX, or if memory grows after it has settled. A stopped run resumes with
the next write, after it has read back the last ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dcp.server.config.sources import OPTIONS
from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient
from support.server import DcpdProcess
from vbucket.model.ids import vbucket_of

BATCH = 2_000
"""Writes in flight."""
REPORT_S = 10.0
LIVE_OVERHEAD_BYTES = 55 + 40 + 12
"""Bytes of a document besides key and value: its frame's head, its record by key, its columns."""
LOG_BYTES_MAX = 256 << 20
"""Writers wait once two memtables are not merged. In addition there is the segment that was merged
last and is being removed, and the zeros ahead of the end.
"""
GROWTH_BYTES_MAX = 128 << 20
"""How much more memory the second half of a run may use at most than the first half: the use rises
and falls with merges."""
CHECKED = 5_000
_MIX = 0x9E3779B97F4A7C15


class Plan(NamedTuple):
    """How a folder was begun; a resumed run uses the same plan."""

    keys: int
    value_bytes: int
    history_window: str
    history_bytes: str

    def key_of(self, write: int) -> bytes:
        """Return the key of a write: it looks random, but is the same every time."""
        mixed = (write * _MIX) & 0xFFFF_FFFF_FFFF_FFFF
        mixed = ((mixed ^ mixed >> 29) * _MIX) & 0xFFFF_FFFF_FFFF_FFFF
        return b"key%09d" % ((mixed >> 32) % self.keys)

    def value_of(self, write: int) -> bytes:
        return (b"%016d" % write).ljust(self.value_bytes, b".")

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("--history-window", self.history_window, "--history-bytes", self.history_bytes)

    @property
    def live_bytes(self) -> int:
        return self.keys * (len(self.key_of(0)) + self.value_bytes + LIVE_OVERHEAD_BYTES)

    @property
    def store_bytes_max(self) -> int:
        option = OPTIONS["history_bytes"][1]
        return 3 * self.live_bytes + int(option.parse(self.history_bytes, option))


class Memory(NamedTuple):
    """Anonymous memory of the server and of its store process."""

    server_bytes: int
    store_bytes: int


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def memory_of(pid: int) -> Memory:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return Memory(anonymous_bytes(pid), sum(map(anonymous_bytes, map(int, children))))


def disk_bytes(folder: Path) -> int:
    sizes = 0
    for path in folder.rglob("*"):
        try:
            sizes += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue  # a merge has just deleted a segment
    return sizes


def batches(plan: Plan, first: int, last: int) -> Iterator[tuple[int, bytes]]:
    """Yield (next write, packets) up to the last write."""
    while first < last:
        end = min(last, first + BATCH)
        packets = []
        for write in range(first, end):
            key = plan.key_of(write)
            packets.append(
                pack_request(
                    Opcode.SETQ, key=key, extras=bytes(8), value=plan.value_of(write),
                    vb_id=vbucket_of(key),
                )
            )  # fmt: skip
        first = end
        yield end, b"".join(packets)


def check(client: RawClient, plan: Plan, written: int) -> None:
    """Read back the last writes."""
    newest = {plan.key_of(write): write for write in range(max(0, written - CHECKED), written)}
    for key, write in newest.items():
        frame = client.ask(Opcode.GET, key=key, vb_id=vbucket_of(key))
        assert frame.status == Status.OK, f"{key!r}, written last by {write}: {frame}"
        # A batch that was being sent when the run was stopped is written again.
        assert int(frame.value[:16]) >= write, f"{key!r} is {frame.value[:16]!r}, not {write}"


def run(folder: Path, plan: Plan, writes: int) -> int:
    """Write until this many writes were made, over all runs in this folder; return exit code."""
    folder.mkdir(exist_ok=True)
    state_path = folder / "churn.json"
    written = 0
    if state_path.exists():
        state = json.loads(state_path.read_text())
        plan, written = Plan(*state["plan"]), state["written"]
    with DcpdProcess(folder / "data", *plan.arguments) as server:
        client = RawClient(server.port)
        check(client, plan, written)
        first, began_s = written, time.monotonic()
        said_s, said, worst_store = began_s, written, 0
        most = [0, 0]
        for written, packets in batches(plan, written, writes):  # noqa: B020 - it is where we are
            client.send(packets)
            assert client.ask(Opcode.NOOP).status == Status.OK, "a SETQ failed"
            now_s = time.monotonic()
            if now_s - said_s < REPORT_S and written < writes:
                continue
            state_path.write_text(json.dumps({"plan": plan, "written": written}))
            memory = memory_of(server.pid)
            store, log = (disk_bytes(folder / "data" / name) for name in ("store", "log"))
            worst_store = max(worst_store, store)
            metrics = server.metrics()
            print(
                f"{written:>12,} writes  {(written - said) / (now_s - said_s):>8,.0f}/s"
                f"  store {store >> 20:>5} of {plan.store_bytes_max >> 20} MiB,"
                f" {store / plan.live_bytes:.2f} x live  log {log >> 20:>3} MiB"
                f"  memory {memory.server_bytes >> 20} + {memory.store_bytes >> 20} MiB"
                f"  dropped {metrics['dcpd_compacted_versions_total']:,.0f}",
                flush=True,
            )
            said_s, said = now_s, written
            half = int(2 * (written - first) > writes - first)
            most[half] = max(most[half], sum(memory))
            if most[0] and most[1] - most[0] > GROWTH_BYTES_MAX:
                print(f"memory grew from {most[0]} to {most[1]} bytes")
                return 1
            if store > plan.store_bytes_max:
                print(f"the store takes {store} bytes, more than {plan.store_bytes_max}")
                return 1
            if log > LOG_BYTES_MAX:
                print(f"the log takes {log} bytes, more than {LOG_BYTES_MAX}")
                return 1
        check(client, plan, written)
        client.__exit__(None, None, None)
        server.stop()
    print(
        f"{written:,} writes over {plan.keys:,} keys: at most {worst_store / plan.live_bytes:.2f} "
        f"times the live data in the store, memory at most {max(most) >> 20} MiB; {folder} stays"
    )
    return 0
