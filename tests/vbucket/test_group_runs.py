"""Whole commit groups on a replica: the loop in C against its twins in Python.

Everything that a change touches must be equal, and what one refuses the other must not take.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp.session.replication_port import ReplicationError
from failover.replication.messages import ENTRY_OVERHEAD_BYTES_MAX, checked_group
from support.memory_node import MemoryNode
from support.stored_bytes import pack_deletion, pack_mutation
from vbucket.engine.partition import Partition
from vbucket.engine.replicated import ReplicatedChanges
from vbucket.model.entry import pack_system_event
from vbucket.model.manifest import ManifestEvent
from vbucket.native import group_run, new_staged
from vbucket.store.environment import StoreDamagedError

pytestmark = pytest.mark.skipif(
    new_staged() is None, reason="the loops in C are not built (scripts/compile)"
)

PARTITIONS = 4
EPOCH = 3
COLLECTION = 8
VALUE_BYTES_MAX = 200
KEYS = (b"\0a", b"\0b", b"\0" + b"c" * 250, b"\x08a", b"\x08b", b"\x0agone")
NUMBERS = (
    "high_seqno", "committed_seqno", "synced_seqno", "merged_seqno", "max_cas", "item_count",
    "last_group", "purge_seqno", "recent_bytes", "older_bytes",
)  # fmt: skip
KINDS = (*["set"] * 6, "delete", "delete", "expire", "expiry", "xattr", "event", "long", "forgot")
CHANGES = st.tuples(
    st.sampled_from(KINDS), st.integers(0, PARTITIONS - 1), st.sampled_from(KEYS),
    st.integers(0, 40),
)  # fmt: skip
MOMENTS = ("open", "synced", "frozen", "merged", "purged")


class Master:
    """Makes the entries of commit groups, as a master would."""

    def __init__(self) -> None:
        self.highs = dict.fromkeys(range(PARTITIONS), 0)
        self._newest: dict[tuple[int, bytes], int] = {}

    def group(self, story: Iterable[tuple[str, int, bytes, int]]) -> bytes:
        return b"".join(self._entry(*each) for each in story)

    def _entry(self, kind: str, vb_id: int, key: bytes, number: int) -> bytes:
        self.highs[vb_id] += 1
        seqno = self.highs[vb_id]
        if kind == "event":
            event = ManifestEvent(0, 1 + seqno, 0, COLLECTION, "other", None)
            return pack_system_event(vb_id, seqno, event, EPOCH)
        known = 0 if kind == "forgot" else self._newest.get((vb_id, key), 0)
        self._newest[vb_id, key] = seqno
        common: dict[str, Any] = {
            "vb_id": vb_id, "key": key, "cas": 1000 + (seqno * 7919 + number) % 997,
            "seqno": seqno, "rev_seqno": 1 + number, "prev_seqno": known, "epoch": EPOCH,
        }  # fmt: skip
        if kind == "delete":
            return pack_deletion(**common)
        if kind == "expire":
            entry = bytearray(pack_deletion(**common))
            entry[13], entry[16] = 0x59, 20
            entry[20:24] = (20 + len(key)).to_bytes(4, "big")
            return bytes(entry[:52] + bytes(4) + entry[54:])
        value = b"v" * (VALUE_BYTES_MAX if kind == "long" else number)
        expiry = 2_000_000_000 + number if kind == "expiry" else 0
        datatype = 4 if kind == "xattr" else 0
        return pack_mutation(**common, value=value, expiry=expiry, datatype=datatype)


class Outcome(NamedTuple):
    """What became of a group."""

    ends: dict[int, int] | None
    """None: it was refused, or left to Python."""
    highs: dict[int, int]
    why: str = ""


class Replica:
    """A node that follows all partitions."""

    def __init__(self) -> None:
        self.node = MemoryNode(partitions=PARTITIONS)
        manifest = self.node.engine.keyspace.manifest.create_collection("_default", "other")
        assert COLLECTION in manifest.collections
        self.node.engine.keyspace.replay_manifest(manifest)
        self.changes = ReplicatedChanges(self.node.engine, self.node.store)
        self.highs = dict.fromkeys(range(PARTITIONS), 0)
        self.epochs = dict.fromkeys(range(PARTITIONS), EPOCH)

    def in_c(self, payload: bytes) -> Outcome:
        """Give a group to the loop in C."""
        highs = self.highs.copy()
        applied = self.changes.apply_whole(
            payload, highs, self.epochs, VALUE_BYTES_MAX + ENTRY_OVERHEAD_BYTES_MAX
        )
        if applied is None:
            return Outcome(None, highs)
        self.highs = highs
        assert applied[0] == self.node.engine.keyspace.group
        return Outcome(applied[1], highs)

    def in_python(self, payload: bytes) -> Outcome:
        """Check and apply a group in Python."""
        highs = self.highs.copy()

        def absent(vb_id: int) -> None:
            raise ReplicationError(f"partition {vb_id} is not followed")

        try:
            changes, ends = checked_group(payload, highs, self.epochs, absent, VALUE_BYTES_MAX)
        except ReplicationError as error:
            return Outcome(None, self.highs, str(error))
        self.changes.apply_group(changes)
        self.highs = highs
        return Outcome(ends, highs)

    def pass_to(self, moment: str) -> None:
        """Do to the memtable what happens between groups."""
        node = self.node
        if moment == "open":
            return
        self.changes.settle()
        node.commit()
        if moment in {"frozen", "merged"}:
            if node.engine.keyspace.memtables.is_merging:
                node.end_merge()
            node.begin_merge()
        if moment == "merged":
            node.end_merge()
        for part in node.engine.partitions:
            part.purge_seqno = 1 if moment == "purged" else 0

    def facts(self) -> list[Any]:
        """Everything that a change may touch, the order of dictionaries included."""
        node = self.node
        keyspace = node.engine.keyspace
        found: list[Any] = [
            (
                [getattr(part, name) for name in NUMBERS],
                [(list(layer.newest.items()), layer.entries) for layer in part.layers()],
                part.tally.to_document(),
            )
            for part in node.engine.partitions
        ]
        found.append((keyspace.pending, [part.vb_id for part in keyspace.touched]))
        found.append((keyspace.group, keyspace.memtables.active_bytes, keyspace.broken_invariant()))
        found.append(sorted(each for held in node.engine.due.active.lists() for each in held))
        found.append(list(self.changes._presumed.presumed.items()))
        found.append([node.device.read(segment) for segment in node.device.segments()])
        return found


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(CHANGES, min_size=1, max_size=60), st.sampled_from(MOMENTS)),
        min_size=1, max_size=5,
    )
)  # fmt: skip
def test_both_leave_the_same(
    story: list[tuple[list[tuple[str, int, bytes, int]], str]],
) -> None:
    master, c, python = Master(), Replica(), Replica()
    for changes, moment in story:
        payload = master.group(changes)
        expected = python.in_python(payload)
        assert expected.why == ""
        outcome = c.in_c(payload)
        assert list(outcome.ends.items()) == list(expected.ends.items())  # type: ignore[union-attr]
        assert outcome.highs == expected.highs
        assert c.facts() == python.facts()
        for replica in (c, python):
            replica.pass_to(moment)
        assert c.facts() == python.facts()


@settings(max_examples=300, deadline=None)
@given(st.lists(CHANGES, min_size=1, max_size=6), st.data())
def test_what_python_refuses_is_left_to_it_unchanged(
    changes: list[tuple[str, int, bytes, int]], data: st.DataObject
) -> None:
    master, c, python = Master(), Replica(), Replica()
    first = master.group([("set", 0, b"\0a", 3)])
    moment = data.draw(st.sampled_from(["open", "merged", "purged"]), "moment")
    for replica in (c, python):
        assert not replica.in_python(first).why
        replica.pass_to(moment)
    payload = bytearray(master.group(changes))
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, min(len(payload) - 1, 120)))
        payload[at] = data.draw(st.sampled_from([0, 1, 2, 4, 31, 127, 255, payload[at] ^ 1]))
    length = data.draw(st.integers(0, len(payload)) | st.just(len(payload)))
    lied = bytes(payload[:length])
    before = c.facts()
    expected, outcome = python.in_python(lied), c.in_c(lied)
    if expected.why:
        assert outcome.ends is None
        assert outcome.highs == expected.highs
        assert c.facts() == before
    else:
        assert outcome == expected
        assert c.facts() == python.facts()


@pytest.mark.parametrize("what", ["highs", "epochs", "high", "epoch", "behind"])
def test_partition_elsewhere_than_its_link_is_left_to_python(what: str) -> None:
    replica, master = Replica(), Master()
    payload = master.group([("set", vb_id, b"\0a", 1) for vb_id in range(PARTITIONS)])
    if what == "highs":
        del replica.highs[3]
    elif what == "epochs":
        del replica.epochs[3]
    elif what == "high":
        replica.highs[3] = 7
    elif what == "epoch":
        replica.epochs[3] += 1
    else:
        replica.node.engine.partitions[3].high_seqno = 1
    before = replica.facts()
    assert replica.in_c(payload).ends is None
    assert replica.facts() == before


def test_it_applies_what_it_knows_itself() -> None:
    """Otherwise the other tests would hold for a loop that leaves all to Python."""
    replica, given_away = Replica(), []
    engine = replica.node.engine
    replica.changes.group_run = group_run(
        engine.partitions, replica.changes._presumed.presumed, lambda _part, entry: entry,
        given_away.append,
    )  # fmt: skip
    kinds = ["set", "delete", "set", "expire", "xattr"]
    payload = Master().group([(kind, 1, b"\0a", 1) for kind in kinds])
    assert replica.in_c(payload).ends == {1: 5}
    assert given_away == []
    assert engine.partitions[1].item_count == 1


def test_damage_in_the_store_changes_nothing() -> None:
    """The version that an entry replaces cannot be read: it is known before anything is applied."""
    replica = Replica()

    def damaged(part: Partition, _entry: bytes) -> bytes:
        raise StoreDamagedError(f"partition {part.vb_id}: a test")

    engine = replica.node.engine
    replica.changes.group_run = group_run(
        engine.partitions, replica.changes._presumed.presumed, damaged, lambda _change: None
    )
    engine.partitions[2].purge_seqno = 1
    before = replica.facts()
    payload = Master().group([("set", vb_id, b"\0a", 1) for vb_id in range(PARTITIONS)])
    with pytest.raises(StoreDamagedError, match="partition 2: a test"):
        replica.in_c(payload)
    assert replica.facts() == before
    assert replica.highs == dict.fromkeys(range(PARTITIONS), 0)


@pytest.mark.parametrize("linked", [b"", b"short", None, 7])
def test_what_is_no_linked_entry_is_not_stored(linked: Any) -> None:
    replica = Replica()
    engine = replica.node.engine
    replica.changes.group_run = group_run(
        engine.partitions,
        replica.changes._presumed.presumed,
        lambda *_: linked,
        lambda _change: None,
    )
    engine.partitions[0].purge_seqno = 1
    before = replica.facts()
    assert replica.in_c(Master().group([("set", 0, b"\0a", 1)])).ends is None
    assert replica.facts() == before


def test_arguments_are_checked() -> None:
    run = Replica().changes.group_run
    assert run is not None
    good: list[Any] = [b"", {}, {}, 100, [], [], 1]
    assert run.apply(*good) == {}
    for place, wrong in enumerate([bytearray(), [], [], -1, (), (), 1 << 64]):
        with pytest.raises((TypeError, OverflowError)):
            run.apply(*good[:place], wrong, *good[place + 1 :])
    with pytest.raises(TypeError):
        run.apply(*good[:6])
    with pytest.raises((TypeError, AttributeError)):
        group_run([object()], {}, lambda *_: b"", lambda _: None)
    with pytest.raises(ValueError, match="no partition"):
        group_run([], {}, lambda *_: b"", lambda _: None)


NO_MEMORY = """
import _testcapi
from test_group_runs import KEYS, Master, Replica

story = [("set", 1 + n % 2, KEYS[n % 2], 40 * n) for n in range(6)]

def attempt(fail_at):
    replica, master = Replica(), Master()
    replica.in_python(master.group([*story[:3], ("expiry", 0, KEYS[0], 1)]))
    replica.pass_to("merged")
    replica.pass_to("purged")
    parts, keyspace = replica.node.engine.partitions, replica.node.engine.keyspace
    payload = master.group([*story, ("forgot", 1, b"\\0new", 1), ("set", 3, KEYS[3], 1)])
    before = [part.high_seqno for part in parts]
    failed = False
    _testcapi.set_nomemory(fail_at, fail_at + 1)
    try:
        replica.in_c(payload)
    except MemoryError:
        failed = True
    finally:
        _testcapi.remove_mem_hooks()
    if keyspace.broken_invariant():
        return failed
    for part, high_seqno in zip(parts, before):
        if part.high_seqno != high_seqno:
            assert part.max_cas >= int.from_bytes(part.active.entries[-1][28:36], "big"), fail_at
            assert part in keyspace.touched, fail_at
    if not failed:
        assert parts[1].high_seqno == before[1] + 4, fail_at
    return failed

assert sum(attempt(fail_at) for fail_at in range(140)) > 20
"""


NEXT_PAGE = """
import ctypes, mmap, sys
from test_group_runs import KEYS, Master, Replica

story = [("set", 0, KEYS[0], 3), ("delete", 1, KEYS[1], 1), ("set", 0, KEYS[2], 5)]
entries = Master().group(story)
pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
end = begin + mmap.PAGESIZE
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
tried = 0
for length in range(len(entries) + 1):
    data = entries[:length] + b""
    size = sys.getsizeof(data)
    if size % 8 or not length:
        continue  # the object would need padding
    ctypes.memmove(end - size, id(data), size)
    ctypes.c_ssize_t.from_address(end - size).value = 1 << 20  # nothing frees it
    copy = ctypes.cast(ctypes.c_void_p(end - size), ctypes.py_object)
    assert copy.value == data
    assert Replica().in_c(copy.value).ends is None, length
    tried += 1
print(tried)
"""


def test_nothing_is_read_behind_a_group_that_is_cut() -> None:
    """Nobody may read the page behind the bytes. In a process of its own, which would die of it."""
    done = in_a_process(NEXT_PAGE)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def in_a_process(source: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (root, root / "tests", Path(__file__).parent)))
    return subprocess.run(
        [sys.executable, "-c", source], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_change_without_memory_is_noticed_or_has_not_happened() -> None:
    """One allocation after the other fails. In a process of its own, whose memory it is."""
    pytest.importorskip("_testcapi")
    done = in_a_process(NO_MEMORY)
    assert done.returncode == 0, done.stderr
