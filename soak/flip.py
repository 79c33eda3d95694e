"""Single flipped bits in a real LMDB file: what a reader makes of them, and what the check names.

Every flip happens to a copy of one small store, and is read in a process of its own, because LMDB
may crash on what it finds. A reader asks for every key, every version and a few keys that were
never there; the truth is what it was told before the flip.

What must hold: never WRONG and never UNNAMED; and whatever is not RIGHT, the check names. LOST is
what checksums of records cannot prevent: a damaged tree leads past a record that is there.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from dcp.server.verify import page_findings
from vbucket.device import UnknownFormatError
from vbucket.device_files import FileLogDevice, read_mark_slots, read_segment, segments_in
from vbucket.entry import pack_mutation
from vbucket.kvenv import StoreDamagedError, StoreFailedError
from vbucket.kvenv_lmdb import LmdbEnv, LmdbFile
from vbucket.log import LogDamagedError
from vbucket.log_end import NO_RECORD, LogEnd
from vbucket.log_recovery import recover
from vbucket.log_writer import LogWriter
from vbucket.merge import merge
from vbucket.store import Store
from vbucket.store_records import TABLES, NodeRecord, PartitionRecord
from vbucket.verify import StoreCheck

VBS: Final = (3, 700)
KEYS: Final = 250
READ_S: Final = 20
PAGE_BYTES: Final = 4096
BRANCH, LEAF, OVERFLOW, META = 1, 2, 4, 8
CLASSES: Final = {"branch": BRANCH, "leaf": LEAF, "overflow": OVERFLOW, "meta": META}
NAMED: Final = (LogDamagedError, StoreDamagedError, StoreFailedError, UnknownFormatError)


class Outcome(IntEnum):
    """What a reader made of a flip; the exit code of its process."""

    RIGHT = 0
    REFUSED = 10
    LOST = 11
    """Something that is there was said not to be."""
    WRONG = 12
    """Something was told that never was."""
    UNNAMED = 13
    """An error that does not say that data is damaged."""
    CRASHED = 14


class Flip(NamedTuple):
    """One bit of the file."""

    page_class: str
    offset: int
    bit: int


class Result(NamedTuple):
    """What came of a flip."""

    flip: Flip
    outcome: Outcome
    is_found: bool
    detail: str


Truth = dict[tuple[int, bytes | int], object]


def make_store(folder: Path) -> Truth:
    """Write a store of several levels; return what a reader is told of it."""
    folder.mkdir()
    env = LmdbEnv(folder / "store", TABLES, map_size_bytes=1 << 26)
    node = NodeRecord(1, env.engine, "00ff", clean_shutdown=True, durability="commit",
                      merged_segment=0)  # fmt: skip
    empty = PartitionRecord(1, 0, 0, 0, 0, 0, 0, [[1, 0, 0]])
    Store.create(env, node, dict.fromkeys(VBS, empty)).close()
    log = folder / "log"
    draw = random.Random(5)
    device = FileLogDevice(log, lambda: draw.getrandbits(64))
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


def flips(folder: Path, draw: random.Random) -> Iterator[Flip]:
    """Yield bits, page classes in turn: most of a file is bodies of blocks, which are the least of
    the trouble.
    """
    data = (folder / "store" / "data.mdb").read_bytes()
    pages: dict[str, list[int]] = {name: [] for name in CLASSES}
    for page in range(len(data) // PAGE_BYTES):
        start = page * PAGE_BYTES
        if int.from_bytes(data[start : start + 8], "little") != page:
            continue  # not the first page of a large value
        flags = int.from_bytes(data[start + 10 : start + 12], "little")
        for name, bit in CLASSES.items():
            if flags & 0x0F == bit:
                pages[name].append(page)
    while True:
        name = draw.choice(("branch", "leaf", "leaf", "overflow", "meta"))
        start = draw.choice(pages[name]) * PAGE_BYTES
        lower, upper = (
            int.from_bytes(data[start + at : start + at + 2], "little") for at in (12, 14)
        )
        used = [*range(lower), *range(upper, PAGE_BYTES)] if name in {"branch", "leaf"} else []
        offset = draw.choice(used) if used else draw.randrange(200 if name == "meta" else 4096)
        yield Flip(name, start + offset, draw.randrange(8))


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
        except BaseException:  # noqa: BLE001 - whatever it is, it is told and counted
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
    """Open a store and ask for everything; each refusal is fine, each answer must be right."""
    refused = lost = ""
    try:
        env = LmdbEnv(folder / "store", TABLES, map_size_bytes=1 << 26)
        store = Store(env)
        node = store.node()
        if node is None:
            return Outcome.REFUSED, "no node: a server refuses to make one beside a log"
        device = FileLogDevice(folder / "log", lambda: 0)
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
    """Return what the offline check names first, "" where it names nothing."""
    found = next(page_findings(folder), None)
    if found is None:
        try:
            file = LmdbFile(folder / "store", TABLES)
        except NAMED as error:
            return str(error)
        log = folder / "log"
        store_check = StoreCheck(
            file,
            segments_in(log),
            partial(read_segment, log),
            marks=read_mark_slots(log),
            vb_ids=VBS,
        )
        found = next(store_check.findings(), None)
    return found.line() if found else ""


def run(folder: Path, seed: int, count: int) -> Iterator[Result]:
    """Flip bits one by one, each in a fresh copy."""
    truth = make_store(folder / "good")
    data = (folder / "good" / "store" / "data.mdb").read_bytes()
    bad = folder / "bad"
    chosen = flips(folder / "good", random.Random(seed))
    for _ in range(count):
        flip = next(chosen)
        shutil.rmtree(bad, ignore_errors=True)
        shutil.copytree(folder / "good" / "log", bad / "log")
        damaged = bytearray(data)
        damaged[flip.offset] ^= 1 << flip.bit
        (bad / "store").mkdir()
        (bad / "store" / "data.mdb").write_bytes(damaged)
        is_found, outcome, text = in_a_child(bad, truth)
        yield Result(flip, outcome, is_found, text)


def problem_of(result: Result) -> str:
    """Say which rule a result breaks; "" if none."""
    if result.outcome in {Outcome.WRONG, Outcome.UNNAMED}:
        return f"a reader must not see this: {result}"
    if result.outcome != Outcome.RIGHT and not result.is_found:
        return f"the check does not name this: {result}"
    return ""


def soak(folder: Path, seed: int, count: int) -> int:
    """Flip many bits, and tell what came of them; return the exit code."""
    counts: Counter[str] = Counter()
    problems = 0
    for result in run(folder, seed, count):
        found = "named by the check" if result.is_found else "not named"
        counts[f"{result.flip.page_class:9} {result.outcome.name:9} {found}"] += 1
        if problem := problem_of(result):
            problems += 1
            print(problem, flush=True)
        if counts.total() % 200 == 0:
            print(f"{counts.total():,} of {count:,} flips, {problems} problems", flush=True)
    print("\n".join(f"{number:7,} {what}" for what, number in sorted(counts.items())))
    return 1 if problems else 0
