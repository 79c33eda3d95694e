"""Flips bits and damages pages in a real LMDB file, and runs readers and the check on it.

Each damage happens to a copy of one small store, which a separate process reads. A reader asks for
every key, every version and a few keys that never existed. The truth is what it read before the
damage.

What must hold: an answer is RIGHT, or REFUSED with a reason, and the reader does not crash. The
check names everything that is not RIGHT.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from enum import IntEnum
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from dcp.server.check.verify import page_findings
from support.stored_bytes import pack_mutation
from vbucket.check.store_check import StoreCheck
from vbucket.log.device import UnknownFormatError
from vbucket.log.device_files import FileLogDevice
from vbucket.log.end_mark import NO_RECORD, LogEnd
from vbucket.log.record import LogDamagedError
from vbucket.log.recovery import recover
from vbucket.log.segment_files import read_mark_slots, read_segment, segments_in
from vbucket.log.writer import LogWriter
from vbucket.store.environment import StoreDamagedError, StoreFailedError
from vbucket.store.lmdb.environment_lmdb import LmdbEnv, LmdbPageReader
from vbucket.store.records import STORE_FORMAT_VERSION, TABLES, NodeRecord, PartitionRecord
from vbucket.store.store import Store
from vbucket.upkeep.merge import merge

VBS: Final = (3, 700)
KEYS: Final = 250
READ_S: Final = 20
PAGE_BYTES: Final = 4096
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
CLASSES: Final = {"branch": BRANCH, "leaf": LEAF, "overflow": OVERFLOW, "meta": META}
NAMED: Final = (LogDamagedError, StoreDamagedError, StoreFailedError, UnknownFormatError)


class Outcome(IntEnum):
    """The result for a reader of a damaged store; the exit code of its process."""

    RIGHT = 0
    REFUSED = 10
    LOST = 11
    """Existing data was reported as absent."""
    WRONG = 12
    """The reader got data that never existed."""
    UNNAMED = 13
    """An error that does not report damage."""
    CRASHED = 14


class Damage(NamedTuple):
    """Changed bytes of the file."""

    page_class: str
    kind: str
    offset: int
    data: bytes


class Result(NamedTuple):
    """The result of a damage."""

    damage: Damage
    outcome: Outcome
    is_found: bool
    detail: str


Truth = dict[tuple[int, bytes | int], object]


def make_store(folder: Path) -> Truth:
    """Write a store of several levels; return what a reader must find in it."""
    folder.mkdir()
    env = LmdbEnv(folder / "store", TABLES, map_size_bytes=1 << 26)
    node = NodeRecord(STORE_FORMAT_VERSION, env.engine, "00ff", clean_shutdown=True,
                       durability="commit",
                      merged_segment=0)  # fmt: skip
    empty = PartitionRecord(1, 0, 0, 0, 0, 0, 0, [[1, 0, 0]])
    Store.create(env, node, dict.fromkeys(VBS, empty)).close()
    log = folder / "log"
    draw = random.Random(5)
    device = FileLogDevice(log, draw)
    writer = LogWriter(device)
    writer.rotate()
    entries = []
    for vb_id in VBS:
        last: dict[bytes, int] = {}
        for seqno in range(1, KEYS + 200):
            key = b"\0key-%05d" % draw.randrange(KEYS)
            entries.append(
                pack_mutation(
                    vb_id=vb_id, key=key, value=b"%d" % seqno * draw.randrange(1, 60),
                    cas=seqno << 16, seqno=seqno, rev_seqno=1, prev_seqno=last.get(key, 0),
                )
            )  # fmt: skip
            last[key] = seqno
    writer.append(1, b"".join(entries))
    writer.rotate()
    merge(env, [(1, read_segment(log, 1))])
    device.delete(1)
    device.close()
    store = Store(env)
    truth = dict(answers(store))
    store.close()
    env.close()
    return truth


def answers(store: Store) -> Iterator[tuple[tuple[int, bytes | int], object]]:
    """Yield everything that a server could ask a store for."""
    for vb_id in VBS:
        yield (vb_id, b"record"), store.partition(vb_id)
        for number in range(KEYS + 20):
            key = b"\0key-%05d" % number
            yield (vb_id, key), store.meta(vb_id, key)
        for seqno in range(KEYS + 201):
            yield (vb_id, seqno), store.entry(vb_id, seqno)
        batch = store.frames(vb_id, 1, KEYS + 199, b"opaq", set(), 1 << 30)
        yield (vb_id, b"frames"), batch.frames


def pages_of(data: bytes) -> dict[str, list[int]]:
    """Return the numbers of the pages of each class."""
    pages: dict[str, list[int]] = {name: [] for name in CLASSES}
    for page in range(len(data) // PAGE_BYTES):
        start = page * PAGE_BYTES
        if int.from_bytes(data[start : start + 8], "little") != page:
            continue  # not the first page of a large value
        flags = int.from_bytes(data[start + 10 : start + 12], "little")
        for name, bit in CLASSES.items():
            if flags & 0x0F == bit:
                pages[name].append(page)
    return pages


def flips(data: bytes, draw: random.Random) -> Iterator[Damage]:
    """Yield flipped bits, page classes in turn, because most of a file is bodies of blocks, where
    damage is easiest to handle.
    """
    pages = pages_of(data)
    while True:
        name = draw.choice(("branch", "leaf", "leaf", "overflow", "meta"))
        start = draw.choice(pages[name]) * PAGE_BYTES
        lower, upper = (
            int.from_bytes(data[start + at : start + at + 2], "little") for at in (12, 14)
        )
        used = [*range(lower), *range(upper, PAGE_BYTES)] if name in {"branch", "leaf"} else []
        at = start + (
            draw.choice(used) if used else draw.randrange(200 if name == "meta" else 4096)
        )
        yield Damage(name, "bit", at, bytes([data[at] ^ 1 << draw.randrange(8)]))


def bad_pages(data: bytes, draw: random.Random) -> Iterator[Damage]:
    """Yield whole pages, sectors and pointers that are damaged."""
    pages = pages_of(data)
    kinds = {
        "zeros": lambda _: (0, bytes(PAGE_BYTES)),
        "ones": lambda _: (0, b"\xff" * PAGE_BYTES),
        "noise": lambda _: (0, draw.randbytes(PAGE_BYTES)),
        "noise below the header": lambda page: (16, draw.randbytes(PAGE_BYTES - 16)),
        "a page of its class": lambda page: (0, _page(data, draw.choice(pages[page]))),
        "another page": lambda _: (0, _page(data, draw.randrange(len(data) // PAGE_BYTES))),
        "a sector of zeros": lambda _: (512 * draw.randrange(8), bytes(512)),
        "a sector of noise": lambda _: (512 * draw.randrange(8), draw.randbytes(512)),
        "another type": lambda _: (10, bytes([draw.choice((0, 1, 2, 3, 4, 6, 8, 0x12, 0x22))])),
        "another free space": lambda _: (12, draw.randbytes(4)),
        "other nodes": lambda _: (16 + 2 * draw.randrange(40), draw.randbytes(2)),
    }
    while True:
        name = draw.choice(("branch", "branch", "leaf", "leaf", "overflow", "meta"))
        kind = draw.choice((*kinds, "another child"))
        start = draw.choice(pages[name]) * PAGE_BYTES
        if kind == "another child":
            if name != "branch":
                continue
            count = (int.from_bytes(data[start + 12 : start + 14], "little") - 16) // 2
            slot = start + 16 + 2 * draw.randrange(count)
            child = draw.choice((start // PAGE_BYTES, draw.randrange(len(data) // PAGE_BYTES)))
            offset = int.from_bytes(data[slot : slot + 2], "little")
            yield Damage(name, kind, start + offset, child.to_bytes(6, "little"))
            continue
        offset, changed = kinds[kind](name)
        yield Damage(name, kind, start + offset, changed)


def _page(data: bytes, number: int) -> bytes:
    return data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]


def in_a_child(folder: Path, truth: Truth) -> tuple[bool, Outcome, str]:
    """Check and read a store in a process of its own: what the check found, what a reader saw."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = int(Outcome.UNNAMED)
        try:
            os.close(reader)
            faulthandler.disable()
            signal.alarm(READ_S)
            os.write(writer, f"{check(folder)}\0".encode())
            outcome, text = read_all(folder, truth)
            code = int(outcome)
        except BaseException:  # noqa: BLE001 - any exception is reported and counted
            text = traceback.format_exc()
        finally:
            os.write(writer, text.encode()[-4000:])
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        named, _, text = pipe.read().decode(errors="replace").partition("\0")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        return bool(named), Outcome.CRASHED, f"{signal.Signals(-code).name} {named}"
    return bool(named), Outcome(code), text or named


def read_all(folder: Path, truth: Truth) -> tuple[Outcome, str]:
    """Open a store and ask for everything. Refusals are fine; answers must be right."""
    refused = lost = ""
    try:
        env = LmdbEnv(folder / "store", TABLES, map_size_bytes=1 << 26)
        store = Store(env)
        node = store.node()
        if node is None:
            return Outcome.REFUSED, "no node: a server refuses to make one beside a log"
        device = FileLogDevice(folder / "log", Random(0))
        merged_end = LogEnd.from_document(node.merged_end or NO_RECORD)
        list(recover(device, node.merged_segment, merged_end=merged_end).groups())
    except NAMED as error:
        return Outcome.REFUSED, str(error)
    for (vb_id, what), expected in truth.items():
        try:
            found = ask(store, vb_id, what)
        except NAMED as error:
            refused = str(error)
            continue
        if found != expected:
            if found is not None and found != []:
                return Outcome.WRONG, f"vb {vb_id}, {what!r}: {found!r:.200}, not {expected!r:.200}"
            lost = f"vb {vb_id}, {what!r}: not there"
    if lost:
        return Outcome.LOST, lost
    return (Outcome.REFUSED, refused) if refused else (Outcome.RIGHT, "")


def ask(store: Store, vb_id: int, what: bytes | int) -> object:
    """Ask for one thing of `answers`."""
    if what == b"record":
        return store.partition(vb_id)
    if what == b"frames":
        return store.frames(vb_id, 1, KEYS + 199, b"opaq", set(), 1 << 30).frames
    if isinstance(what, int):
        return store.entry(vb_id, what)
    return store.meta(vb_id, what)


def check(folder: Path) -> str:
    """Return the first finding of the offline check, "" if there is none."""
    found = next(page_findings(folder), None)
    if found is None:
        try:
            file = LmdbPageReader(folder / "store", TABLES)
        except NAMED as error:
            return str(error)
        log = folder / "log"
        store_check = StoreCheck(
            file,
            {segment: read_segment(log, segment) for segment in segments_in(log)},
            marks=read_mark_slots(log),
            vb_ids=VBS,
        )
        found = next(store_check.findings(), None)
    return found.line() if found else ""


def run(
    folder: Path,
    seed: int,
    count: int,
    damages: Callable[[bytes, random.Random], Iterator[Damage]] = flips,
) -> Iterator[Result]:
    """Apply one damage after another, each to a fresh copy."""
    truth = make_store(folder / "good")
    data = (folder / "good" / "store" / "data.mdb").read_bytes()
    bad = folder / "bad"
    for damage in islice(damages(data, random.Random(seed)), count):
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(folder / "good" / "log", bad / "log")
        damaged = bytearray(data)
        damaged[damage.offset : damage.offset + len(damage.data)] = damage.data
        (bad / "store").mkdir()
        (bad / "store" / "data.mdb").write_bytes(damaged)
        is_found, outcome, text = in_a_child(bad, truth)
        yield Result(damage, outcome, is_found, text)


def problem_of(result: Result) -> str:
    """Say which rule a result breaks; "" if none."""
    if result.outcome not in {Outcome.RIGHT, Outcome.REFUSED}:
        return f"a reader must not see this: {result}"
    if result.outcome != Outcome.RIGHT and not result.is_found:
        return f"the check does not name this: {result}"
    return ""


def soak(folder: Path, seed: int, count: int) -> int:
    """Apply many damages, half of them flipped bits, and print the results; return exit code."""
    counts: Counter[str] = Counter()
    problems = 0
    (folder / "bits").mkdir()
    (folder / "pages").mkdir()
    bits = run(folder / "bits", seed, count // 2)
    for result in chain(bits, run(folder / "pages", seed, count - count // 2, bad_pages)):
        found = "named by the check" if result.is_found else "not named"
        page_class, kind, *_ = result.damage
        counts[f"{page_class:9} {kind:22} {result.outcome.name:9} {found}"] += 1
        if problem := problem_of(result):
            problems += 1
            print(problem, flush=True)
        if counts.total() % 200 == 0:
            print(f"{counts.total():,} of {count:,} damages, {problems} problems", flush=True)
    print("\n".join(f"{number:7,} {what}" for what, number in sorted(counts.items())))
    return 1 if problems else 0
