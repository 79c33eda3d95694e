"""The kinds `disk` and `map`: no room for the log, no room for the store.

`disk`: a disk of a few megabytes (a tmpfs, which only root may mount) is filled under load, by the
server's own data or by another file. Then one or several of these happen:

    room         there is room again, without a restart
    killed       SIGKILL, and a start on the full disk, which may be read-only
    stopped      SIGTERM, which ends within ten seconds, and a start on the full disk
    store        SIGKILL of the store process, which is replaced

`map`: LMDB's first map is too small for the data (--map-size-bytes). In half of the cases the store
process also cannot get more address space for a while.

What must hold: refusals name the cause, reads continue, no answered change is lost, and writes
continue once there is room, without a restart.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode
from support.forgetful_disk import fill, small_disk
from support.raw_client import RawClient
from tests.soak.attack.case import AttackedServer, Case, Fault, NotRunError
from tests.soak.attack.commands import dcpctl
from tests.soak.attack.load import Load
from tests.soak.attack.processes import (
    ANSWER_SLACK_S,
    BACK_S,
    STOP_S,
    http_get,
    put_probe_key,
    some_partitions,
    watched,
    write_again,
)
from tests.soak.attack.truth import Ledger, check_holds, keys_in
from vbucket.model.ids import vbucket_of

FULL_S: Final = 60.0
"""Time for the disk to become full, or for writes to be refused because of it."""
READ_S: Final = 4.0
"""Time for a read that does not have to wait for anything."""
ENDINGS: Final = ("room", "killed", "stopped", "store")
NO_ROOM: Final = ("No space left", "disk is full", "there is room")
"""Words that name a full disk."""
GET_WAITS: Final = "on a full disk a GET waits if its partition has a change that waits"
REASONS: Final = frozenset({"log_full", "store_behind", "read_only"})
MORE_MEBIBYTES: Final = 100
"""By how much the disk grows: enough room, although the data has grown meanwhile."""
MAP_BYTES: Final = 64 << 20
"""The smallest map that the server accepts."""


@contextmanager
def disk_of(case: Case, mebibytes: int) -> Iterator[Path]:
    """Mount a small disk. Raises NotRunError if that is not permitted."""
    try:
        with small_disk(f"{mebibytes}m") as disk:
            yield disk
    except pytest.skip.Exception as error:
        raise NotRunError(str(error)) from error


def grow(disk: Path, mebibytes: int) -> None:
    options = f"remount,size={mebibytes}m"
    subprocess.run(["mount", "-o", options, str(disk)], check=True, capture_output=True)


class FullDisk:
    """One case of `disk`, on its disk."""

    def __init__(self, case: Case, disk: Path, mebibytes: int) -> None:
        self.case, self.disk, self.mebibytes = case, disk, mebibytes
        draw = case.draw
        self.is_own = draw.random() < 0.5
        count = 1 if case.is_short else draw.randint(1, 3)
        self.endings = [draw.choice(ENDINGS) for _ in range(count)]
        who = "own data" if self.is_own else "another file"
        case.note(f"{mebibytes} MiB, filled by {who}, then {', '.join(self.endings)}")
        arguments = ["--memtable-bytes", draw.choice(("1MiB", "2MiB")), "--write-wait", "300ms"]
        if draw.random() < 0.5:
            arguments += ["--audit", "off"]
        self.server = AttackedServer(disk / "data", *arguments)
        self.server.log_path = case.folder / "server.log"
        self.ledger = Ledger()
        self.keys = keys_in(some_partitions(draw, 30), 5000 if self.is_own else 300)
        self.filler: Path | None = None
        self.load: Load | None = None

    def run(self) -> None:
        self.server.start()
        try:
            put_probe_key(self.server.port)
            self.case.watch(watched(self.server))
            self.begin_load()
            time.sleep(self.case.seconds(0.1, 1.5))
            for ending in self.endings:
                self.fill()
                self.wait_until_refused()
                self.check_reads()
                getattr(self, ending)()
                self.make_room()
                self.wait_until_taken()
            self.finish()
        finally:
            self.case.rest()
            self.server.close()

    # -- load ----------------------------------------------------------------------------------

    def begin_load(self) -> None:
        value_bytes = 6000 if self.is_own else 1500
        self.load = Load(
            self.server.port, self.ledger, self.keys, self.case.draw, value_bytes=value_bytes
        )
        self.load.start()

    def end_load(self) -> None:
        """Stop the load. A batch that waits for room is cut off."""
        if self.load is not None:
            load, self.load = self.load, None
            if load.standing_s > ANSWER_SLACK_S / 2:
                load.cut()
            load.stop(ANSWER_SLACK_S)

    # -- the disk ------------------------------------------------------------------------------

    def fill(self) -> None:
        if self.is_own:
            return  # the load fills it
        self.filler = fill(self.disk)

    def make_room(self) -> None:
        if self.filler is not None:
            self.filler.unlink()
            self.filler = None
        self.mebibytes += MORE_MEBIBYTES
        grow(self.disk, self.mebibytes)
        self.is_own = False  # filling the larger disk would take long

    def wait_until_refused(self) -> None:
        """Write until writes are refused or wait for room. The server must name the cause."""
        if self.load is None:
            self.begin_load()
        give_up_at_s = time.monotonic() + FULL_S
        while not any(word in (why := self.server.status()["write_refusal"]) for word in NO_ROOM):
            if not self.is_own and self.filler is not None:
                self.filler = fill_more(self.filler, self.disk)
            if time.monotonic() > give_up_at_s:
                fault = Fault.UNNAMED if why else Fault.BROKEN
                text = f"the disk is full; refused: {why!r} ({self.load and self.load.statuses})"
                self.case.demand(False, fault, text)
            time.sleep(0.02)
        self.case.note(f"refused: {why[:90]} ...")
        for _ in range(50):  # the server may be between two refusals
            answer = http_get(self.server.admin_port, "/readyz")
            if answer.status == 503 and answer.body.get("why") in REASONS:
                break
            if not self.server.status()["write_refusal"]:
                break
        else:
            self.case.demand(False, Fault.UNNAMED, f"/readyz says {answer} on a full disk")

    def check_reads(self) -> None:
        """Check that documents can be read while nothing can be written.

        In a partition with a change that waits for room, a GET waits, too (documented).
        """
        self.end_load()
        waiting = self.ledger.open_vbs
        with RawClient(self.server.port) as client:
            check_holds(self.case, client, self.ledger, leaves_out=waiting)
            beside = [
                key for key, item in self.ledger.known.items()
                if vbucket_of(key) in waiting and not item.unanswered
            ]  # fmt: skip
            if not beside:
                return
            client.send(pack_request(Opcode.GET, key=beside[0], vb_id=vbucket_of(beside[0])))
            if not is_answered(client):
                self.case.documented.append(GET_WAITS)

    # -- endings -------------------------------------------------------------------------------

    def room(self) -> None:
        """Only make room."""

    def killed(self) -> None:
        self.case.rest()
        self.server.kill()
        self.start_on_full_disk()

    def stopped(self) -> None:
        self.case.rest()
        began_s = time.monotonic()
        process = self.server._process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S + ANSWER_SLACK_S)
        spent_s = time.monotonic() - began_s
        code = self.server.stop()
        text = f"SIGTERM on a full disk took {spent_s:.1f} s, exit code {code}"
        self.case.demand(spent_s < STOP_S + 1 and code == 0, Fault.BROKEN, text)
        self.start_on_full_disk()

    def start_on_full_disk(self) -> None:
        self.server.start()
        self.case.watch(watched(self.server))
        with RawClient(self.server.port) as client:
            check_holds(self.case, client, self.ledger)
        refusal = self.server.status()["write_refusal"]
        self.case.note(f"starts {'read-only' if 'read-only' in refusal else 'and writes'}")

    def store(self) -> None:
        for pid in self.server.children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)

    # -- the end -------------------------------------------------------------------------------

    def wait_until_taken(self) -> None:
        self.end_load()
        with RawClient(self.server.port) as client:
            write_again(self.case, client, BACK_S + FULL_S)

    def finish(self) -> None:
        with RawClient(self.server.port) as client:
            check_holds(self.case, client, self.ledger)
        self.server.check(self.case)
        self.case.rest()
        self.case.demand(self.server.stop() == 0, Fault.BROKEN, "no clean stop")
        told = dcpctl("verify", "-o", "json", self.server.data)
        self.case.demand(not told.code, Fault.WRONG, f"verify: {told.text[-500:]}")


def is_answered(client: RawClient) -> bool:
    """Whether an answer comes within READ_S."""
    give_up_at_s = time.monotonic() + READ_S
    while not client.has_answer():
        if time.monotonic() > give_up_at_s:
            return False
        time.sleep(0.02)
    return True


def fill_more(filler: Path, disk: Path) -> Path:
    """Take space that has become free since, because a merge removes segments."""
    with filler.open("ab", buffering=0) as file:
        for size in (1 << 12, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return disk / filler.name


def disk(case: Case) -> None:
    mebibytes = case.draw.choice((6, 9, 14))
    with disk_of(case, mebibytes) as place:
        FullDisk(case, place, mebibytes).run()


# -- map -------------------------------------------------------------------------------------------


@contextmanager
def no_more_address_space(pid: int) -> Iterator[None]:
    """Keep the process from enlarging its map meanwhile."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (24 << 20)
    before = resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_AS, before)


def lmdb_map(case: Case) -> None:
    """Write more than the map can hold."""
    is_limited = case.draw.random() < 0.6
    case.note("no more address space for a while" if is_limited else "the map may grow")
    arguments = ("--map-size-bytes", str(MAP_BYTES), "--memtable-bytes", "4MiB")
    server = AttackedServer(case.folder / "data", *arguments, "--write-wait", "300ms")
    ledger = Ledger()
    server.start()
    try:
        put_probe_key(server.port)
        case.watch(watched(server))
        keys = keys_in(some_partitions(case.draw, 30), 3000)
        load = Load(server.port, ledger, keys, case.draw, value_bytes=40_000)
        with contextlib.ExitStack() as limits:
            if is_limited:
                limits.enter_context(no_more_address_space(server.children()[0]))
            load.start()
            write_beyond_map(case, server, load, is_limited=is_limited)
            with RawClient(server.port) as client:
                load.stop()
                check_holds(case, client, ledger)
        with RawClient(server.port) as client:
            write_again(case, client, BACK_S + FULL_S)
            if server.status()["merge_trouble"]:
                case.note("merging is still put off")
            check_holds(case, client, ledger)
        server.check(case)
        case.rest()
        case.demand(server.stop() == 0, Fault.BROKEN, "no clean stop")
        told = dcpctl("verify", "-o", "json", server.data)
        case.demand(not told.code, Fault.WRONG, f"verify: {told.text[-500:]}")
    finally:
        case.rest()
        server.close()


def write_beyond_map(case: Case, server: AttackedServer, load: Load, *, is_limited: bool) -> None:
    """Write until the store is larger than its first map, or cannot grow."""
    give_up_at_s = time.monotonic() + FULL_S
    path = server.data / "store" / "data.mdb"
    while path.stat().st_size < MAP_BYTES + (8 << 20):
        if load.failure or load.is_cut_off:
            return
        status = server.status()
        if is_limited and status["merge_trouble"] and status["write_refusal"]:
            case.note(f"refused: {status['write_refusal'][:160]}")
            return
        case.demand(time.monotonic() < give_up_at_s, Fault.BROKEN, f"stuck: {status}"[:500])
        time.sleep(0.05)
    case.note(f"the store has {path.stat().st_size >> 20} MiB")
