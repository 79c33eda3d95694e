"""Backups of a whole in-memory node, against a plain model: after any interleaving of writes,
branches, merges, collections, full and killed runs and folds, the archive gives back, for every
run and every seqno, what the node held then."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from clients.backup.archives.archive_check import verify
from clients.backup.archives.point import Point
from clients.backup.fold import fold
from clients.backup.reading import PointReader
from dcp.wire.feature import Feature
from dcp.wire.opcode import Opcode
from support.backup_pair import KilledError, back_up, documents_of, memory_archive, state_as_of
from support.memory_node import MemoryNode
from vbucket.model.ids import NUM_VBUCKETS

VB_IDS = (3, 17)
KEYS = [b"\0a", b"\0b", b"\0c", b"\x08a", b"\x08b"]
"""Of the default collection, and of the first one that is created."""

vb_ids = st.sampled_from(VB_IDS)
writes = st.lists(
    st.tuples(vb_ids, st.sampled_from(KEYS), st.none() | st.integers(0, 200)),
    min_size=1, max_size=12,
)  # fmt: skip
"""Partition, key, and the size of the value; None deletes."""
runs = st.tuples(
    st.just("run"),
    st.booleans(),
    st.integers(1, 500),
    st.lists(st.integers(0, 1500), max_size=2),
)
"""Every version or not; bytes of a read; after how many bytes it is killed, before it comes
through."""
steps = st.one_of(
    st.tuples(st.just("write"), writes),
    st.tuples(st.just("branch"), vb_ids, st.integers(0, 12)),
    runs,
    st.tuples(st.just("write"), writes),
    runs,
    st.tuples(st.just("branch"), vb_ids, st.integers(0, 12)),
    st.tuples(st.sampled_from(["merge", "create", "drop"])),
    st.tuples(st.just("fold"), st.integers(0, 3)),
    st.tuples(st.just("killed_run"), st.booleans(), st.integers(0, 1500)),
)


class Story:
    """The model: for each partition what it held after each of its seqnos, on the branch that is
    current; and for each run a copy of that, as it was when the run ended."""

    def __init__(self, seed):
        self.node = MemoryNode(seed, partitions=NUM_VBUCKETS)
        self.archive = memory_archive()
        self.writer = self.node.connect()
        self.writer.hello(Feature.SELECT_BUCKET, Feature.COLLECTIONS)
        self.states = {vb_id: {0: {}} for vb_id in VB_IDS}
        self.runs = {}
        self.value = 0
        self.has_dropped = False

    def note(self):
        """Take down what is there now, as of every seqno that came since."""
        for vb_id, states in self.states.items():
            high_seqno = self.node.engine.partitions[vb_id].high_seqno
            now = self.documents(vb_id)
            for seqno in range(max(states) + 1, high_seqno + 1):
                states[seqno] = now

    def documents(self, vb_id):
        found = {}
        for key in KEYS:
            frame = self.writer.ask(Opcode.GET, vb_id=vb_id, key=key)
            if frame.status == 0:
                found[key] = frame.value
        return found

    # -- what may happen -----------------------------------------------------------------------

    def write(self, changes):
        for vb_id, key, size in changes:
            self.node.now_ns += 1_000_000
            self.value += 1
            if size is None:
                self.writer.delete(vb_id, key)
            else:
                # No zeros: segments must become full before a run is killed.
                self.writer.set(vb_id, key, random.Random(self.value).randbytes(4 + size))
            self.note()
        self.node.commit()

    def create(self):
        if "more" not in str(self.node.engine.keyspace.manifest):
            self.node.engine.keyspace.set_manifest(
                self.node.engine.keyspace.manifest.create_collection("_default", "more")
            )
            self.note()

    def drop(self):
        if 8 in self.node.engine.keyspace.manifest.collections:
            self.has_dropped = True
            self.node.engine.keyspace.set_manifest(
                self.node.engine.keyspace.manifest.drop_collection("_default", "more")
            )
            self.note()

    def merge(self):
        self.node.merge()

    def branch(self, vb_id, back):
        at = max(0, self.node.engine.partitions[vb_id].high_seqno - back)
        self.node.engine.keyspace.branch(vb_id, at)
        self.node.commit()
        states = self.states[vb_id]
        for seqno in [seqno for seqno in states if seqno > at]:
            del states[seqno]
        self.note()

    def run(self, history, piece_bytes, kills, *, comes_through=True):
        self.node.commit()
        record = None
        for kill_after_bytes in [*kills, *([None] if comes_through else [])]:
            try:
                record = back_up(
                    self.node, self.archive, VB_IDS, history=history, piece_bytes=piece_bytes,
                    kill_after_bytes=kill_after_bytes,
                )  # fmt: skip
            except KilledError:
                continue
            break
        if record is None:
            return
        self.runs[record.run] = {vb_id: dict(states) for vb_id, states in self.states.items()}

    def killed_run(self, history, kill_after_bytes):
        """A run that goes on later, or not: there may be folds and branches before."""
        self.run(history, 100, [kill_after_bytes], comes_through=False)

    def fold(self, keep):
        if not self.runs:
            return
        into = sorted(self.runs)[-1 - min(keep, len(self.runs) - 1)]
        fold(self.archive, into)
        self.runs = {run: states for run, states in self.runs.items() if run >= into}

    # -- what must hold ------------------------------------------------------------------------

    def check(self):
        """Each run gives back what was there at its end, and at each seqno before it."""
        assert verify(self.archive).is_sound
        for run, states in self.runs.items():
            wanted = {vb_id: of_vb[max(of_vb)] for vb_id, of_vb in states.items()}
            assert state_as_of(self.archive, VB_IDS, Point(run=run)) == wanted
            records = Point(run=run).runs_of(self.archive.runs())
            is_exact = all(record.is_history and not record.base_through for record in records)
            reader = PointReader(self.archive, records)
            for vb_id in VB_IDS:
                for seqno in states[vb_id]:
                    view = reader.view(vb_id, Point(run=run, seqnos={vb_id: seqno}))
                    assert view.seqno <= seqno
                    assert documents_of(reader, view) == states[vb_id][view.seqno]
                    if is_exact and not self.has_dropped:
                        assert view.seqno == seqno, "every version is kept: every place is exact"


UNSEEN = [("write", [(3, b"\0a", None)]), ("create",), ("write", [(3, b"\x08a", 0)]), ("drop",)]
"""Documents of a collection that was dropped before any run saw them: no server tells them any
more, and no state that had them may be said to be held."""

DROPPED = [
    ("create",), ("write", [(3, b"\x08a", 5), (3, b"\0a", 5)]), ("run", True, 300, []), ("drop",),
    ("run", False, 300, []), ("fold", 0),
]  # fmt: skip
"""A collection that older runs hold documents of is gone in later ones."""

CUT = [
    ("write", [(3, b"\0a", size) for size in range(6)]), ("run", True, 300, []),
    ("branch", 3, 2), ("write", [(3, b"\0b", 1)]), ("run", True, 300, []),
    ("branch", 3, 4), ("write", [(3, b"\0c", 1)]), ("run", True, 300, []), ("fold", 1),
]  # fmt: skip
"""Later runs stand on states in the middle of what is folded."""


KILLED = [
    ("write", [(3, b"\0a", 90), (3, b"\0a", 90), (3, b"\0b", 90)]), ("run", True, 300, []),
    ("write", [(3, b"\0b", 150) for _ in range(9)]), ("run", True, 300, []), ("branch", 3, 11),
    ("write", [(3, b"\0c", 150) for _ in range(15)]), ("killed_run", True, 2500), ("fold", 0),
    ("write", [(3, b"\0b", 1)]),
]  # fmt: skip
"""A run that rolled back into what is folded while it lies there, killed."""


@settings(max_examples=40)
@example(seed=0, story=KILLED)
@example(seed=0, story=CUT)
@example(seed=0, story=DROPPED)
@example(seed=0, story=UNSEEN)
@example(seed=0, story=DROPPED[:-1])
@given(seed=st.integers(0, 2**16), story=st.lists(steps, min_size=3, max_size=14))
def test_every_run_and_seqno_gives_back_what_was_there(seed, story):
    told = Story(seed)
    for name, *arguments in story:
        getattr(told, name)(*arguments)
    told.run(True, 300, [])
    told.check()
