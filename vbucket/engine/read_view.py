"""Read views: a partition as of one seqno. Sans-IO.

Who calls it: range scans and dumps. A view copies nothing and blocks nobody: writes, merges and
compactions go on. The version of a key at the view's seqno is found through the chain of previous
versions. A pin keeps the partition's history floor at or below that seqno.

Invariants
- history_floor <= seqno <= high_seqno while the view is open, and `seqno` is in `Partition.pins`;
- a view is open for AGE_MAX_S at most, and all of them pin about PINNED_BYTES_MAX at most;
- no owner keeps others out: when there are VIEWS_MAX, one with fewer views gets that of the owner
  who has the most;
- a view shows exactly the documents as of its seqno. After a branch below that seqno, or when it
  was closed because of its age, it raises ViewInvalidError;
- one step of a scan does a bounded amount of work, whatever the number of keys and versions;
- a scan keeps nothing of the store between two steps. If the history branched in between, it starts
  again with the current key.

A view may show uncommitted changes. As after any read, an answer must wait for the `last_group`
that the partition had when the view was opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from itertools import islice, takewhile
from struct import Struct
from typing import Final, NamedTuple

from sortedcontainers import SortedSet

from failover.rules.history import FAILOVER_ENTRIES_MAX
from vbucket.engine.engine import Engine
from vbucket.engine.keyspace import MUTATION
from vbucket.engine.partition import ABSENT, Partition
from vbucket.model.entry import META, MUTATION_KEY_AT, is_deleted, key_of, prev_seqno_of, seqno_of
from vbucket.store.environment import StoreDamagedError
from vbucket.store.key_record import StoredMeta
from vbucket.store.store import Store

VIEWS_MAX: Final = 256
"""Views per node: each pins a partition, and may hold the unmerged keys of that partition."""
AGE_MAX_S: Final = 600
"""An older view is closed, because compaction cannot free anything newer than it."""
PINNED_BYTES_MAX: Final = 256 << 20
"""Changes since the oldest view of each partition, whose versions cannot be freed meanwhile. Above
it the views that pin the most are closed, until `tick` finds less."""
STEP_WORK: Final = 200
"""Keys and versions per step: 1 to 2 ms."""
STEP_BYTES: Final = 1 << 20
"""Bytes of keys and values per step; one document may go beyond."""
_KEYS_AT_ONCE: Final = 128
_UNSEEN_BYTES: Final = 256
"""What a change is taken for that is not in memory any more."""
_FLAGS_AND_EXPIRY: Final = Struct(">52xII")


class ViewRefusedError(Exception):
    """There is no view as of that seqno; the text says why."""


class TooManyViewsError(ViewRefusedError):
    """The node's limit of open views is reached."""


class ViewInvalidError(Exception):
    """The view cannot be read any more; the text says why."""


class Shown(NamedTuple):
    """A document as of a view's seqno."""

    key: bytes
    """With its collection's id."""
    meta: StoredMeta
    value: bytes
    """b"" if no values were asked for."""


_Steps = Generator[Shown | None, None, None]
"""A running scan: yields a document, or None after a piece of work that found none."""


class ReadView:
    """One partition as of one seqno. `Views.open` makes it."""

    def __init__(self, engine: Engine, store: Store, part: Partition, seqno: int) -> None:
        self._engine = engine
        self._store = store
        self._versions = engine.versions
        self._part = part
        self._vb_uuid = part.vb_uuid
        self._known = dict(part.failover.pairs())
        """The versions when the view was opened, newest first."""
        self._why_invalid = ""
        self.opened_ns = 0
        self.owner: str | None = None
        """The user that the view counts for; None: nobody has logged in."""
        self.pinned_bytes = 0
        """Of the changes since it was opened, as of the last `tick`."""
        self.counted_seqno = part.high_seqno
        """Up to there they are counted."""
        self.seqno = seqno
        self.vb_id = part.vb_id
        self.vb_uuid = part.vb_uuid
        """The partition's version when the view was opened."""

    def check(self) -> None:
        """Raise ViewInvalidError if the view cannot be read any more."""
        part = self._part
        if not self._why_invalid and part.vb_uuid != self._vb_uuid:
            began = self._branched_at()
            if began < self.seqno:
                self.invalidate(
                    f"partition {self.vb_id} was rolled back to seqno {began}, below the view's "
                    f"{self.seqno}; open another one"
                )
            self._vb_uuid = part.vb_uuid
        if part.high_seqno < self.seqno:
            self.invalidate(
                f"partition {self.vb_id} gave up changes that its master does not have, down to "
                "seqno "
                f"{part.high_seqno}, below the view's {self.seqno}; open another one"
            )
        if self._why_invalid:
            raise ViewInvalidError(self._why_invalid)
        assert part.history_floor <= self.seqno <= part.high_seqno, "the pin holds"

    def _branched_at(self) -> int:
        """Return the lowest seqno of a branch since the view was opened, or the start of a version
        that a replica has given up since.

        The failover log still has that branch, unless so many followed that the log is full of
        them. Then the branch may have been anywhere, and the answer is 0.
        """
        pairs = dict(self._part.failover.pairs())
        began = [seqno for vb_uuid, seqno in pairs.items() if vb_uuid not in self._known]
        if len(began) == len(pairs) == FAILOVER_ENTRIES_MAX:
            return 0
        given_up = takewhile(lambda version: version[0] not in pairs, self._known.items())
        return min([*began, *(seqno for _, seqno in given_up)])

    def invalidate(self, why: str) -> None:
        """Make every later read raise ViewInvalidError; the first reason counts."""
        self._why_invalid = self._why_invalid or why

    def get(self, key: bytes) -> Shown | None:
        """Return a document, None if there was none. Its time is unbounded if the key has many
        newer versions, so it is for single reads. Raises ViewInvalidError, StoreDamagedError.
        """
        self.check()
        for found in self._resolve(key, with_value=True):
            if found is not None:
                return found
        return None

    def scan(
        self, start: bytes = b"", end: bytes | None = None, *, with_values: bool = True
    ) -> Scan:
        """Return a scan of the documents with start <= key <= end, in the order of their keys."""
        return Scan(self, self._documents(start, end, with_values=with_values))

    def _documents(self, start: bytes, end: bytes | None, *, with_values: bool) -> _Steps:
        for key in self._keys(start, end):
            if key is None:
                yield None
            else:
                yield from self._resolve(key, with_value=with_values)
                yield None

    def _keys(self, start: bytes, end: bytes | None) -> Generator[bytes | None, None, None]:
        """Yield every key that may have existed, ascending; None after other work.

        Unmerged keys are collected first. Those that a merge moves meanwhile are then found in the
        store.
        """
        in_memory: SortedSet[bytes] = SortedSet()
        next_seqno = 1
        while found := self._engine.versions.keys_in_memory(
            self.vb_id, next_seqno, self.seqno, _KEYS_AT_ONCE
        ):
            next_seqno = found[-1][0] + 1
            for _, key in found:
                if start <= key and (end is None or key <= end):
                    in_memory.add(key)
                yield None
        if start:
            yield start
        after = start
        while True:
            stored = self._engine.versions.keys_in_store(self.vb_id, after, _KEYS_AT_ONCE)
            unmerged = list(
                islice(in_memory.irange(after, end, inclusive=(False, True)), _KEYS_AT_ONCE)
            )
            last = [keys[-1] for keys in (stored, unmerged) if len(keys) == _KEYS_AT_ONCE]
            upper = min(last, default=end)
            keys = sorted({*stored, *unmerged})
            if upper is not None:
                keys = [key for key in keys if key <= upper]
            if end is not None:
                keys = [key for key in keys if key <= end]
            yield from keys
            if not last or (end is not None and min(last) >= end):
                return
            after = min(last)

    def _resolve(self, key: bytes, *, with_value: bool) -> _Steps:
        """Yield the document of a key if there was one; None after every version on the way."""
        is_found = False
        while not is_found:
            vb_uuid = self._part.vb_uuid
            is_found = True
            for step in self._walk(key, with_value=with_value):
                yield step
                if self._part.vb_uuid != vb_uuid:
                    # A branch may have undone the next versions and reused their seqnos.
                    is_found = step is not None
                    break

    def _walk(self, key: bytes, *, with_value: bool) -> _Steps:
        part = self._part
        entry = part.newest.get(key)
        if entry is None and part.frozen is not None:
            entry = part.frozen.newest.get(key)
        if entry is None and part.merged_seqno:
            meta = self._store.meta(self.vb_id, key)
            if meta is None or (meta.opcode != MUTATION and meta.seqno <= self.seqno):
                return
            if meta.seqno <= self.seqno and not with_value:
                yield Shown(key, meta, b"")
                return
            entry = self._entry_at(key, meta.seqno)
        while entry and seqno_of(entry) > self.seqno:
            prev_seqno = prev_seqno_of(entry)
            yield None
            if not prev_seqno:
                return
            entry = self._entry_at(key, prev_seqno, may_be_purged=prev_seqno <= self.seqno)
        if entry and not is_deleted(entry):
            value = entry[MUTATION_KEY_AT + len(key) :] if with_value else b""
            yield Shown(key, _meta_of(entry), value)

    def _entry_at(self, key: bytes, seqno: int, *, may_be_purged: bool = False) -> bytes:
        """Return a key's version; ABSENT for a purged tombstone."""
        entry = self._versions.entry_at(self._part, seqno)
        if entry is None and may_be_purged:
            return ABSENT
        if entry is None or key_of(entry) != key:
            raise StoreDamagedError(
                f"partition {self.vb_id}: seqno {seqno} of key {key!r} is missing; check the disk "
                "and "
                "restore a backup",
                self.vb_id,
            )
        return entry


class Scan:
    """The documents of a view, some at a time."""

    def __init__(self, view: ReadView, steps: _Steps) -> None:
        self.view = view
        self._steps = steps
        self.is_done = False
        self.last_work = 0
        """Keys and versions that the last step examined, at least 1."""

    def step(
        self, documents_max: int, work_max: int = STEP_WORK, bytes_max: int = STEP_BYTES
    ) -> list[Shown]:
        """Return up to `documents_max` more documents, perhaps none; `is_done` tells whether the
        scan has ended. Stops after about `bytes_max`. Raises ViewInvalidError, StoreDamagedError.
        """
        self.view.check()
        found: list[Shown] = []
        self.last_work = 0
        while len(found) < documents_max and self.last_work < work_max and bytes_max > 0:
            self.last_work += 1
            try:
                shown = next(self._steps)
            except StopIteration:
                self.is_done = True
                break
            except StoreDamagedError as error:
                self.view.invalidate(str(error))  # a scan that goes on would leave something out
                raise
            if shown is not None:
                found.append(shown)
                bytes_max -= len(shown.key) + len(shown.value)
        return found


class Views:
    """The open views of a node."""

    def __init__(
        self,
        engine: Engine,
        store: Store,
        views_max: int = VIEWS_MAX,
        pinned_bytes_max: int = PINNED_BYTES_MAX,
    ) -> None:
        self._pinned_bytes_max = pinned_bytes_max
        self._engine = engine
        self._store = store
        self._versions = engine.versions
        self._views_max = views_max
        self._open: dict[ReadView, None] = {}
        self._now_ns = 0

    def __len__(self) -> int:
        """Return the number of open views."""
        return len(self._open)

    def __contains__(self, view: ReadView) -> bool:
        """Whether this view is open."""
        return view in self._open

    def open(self, vb_id: int, seqno: int | None = None, owner: str | None = None) -> ReadView:
        """Open a view as of a seqno; None: of the newest state, committed or not. It counts for
        `owner`, a user; None: for all who have not logged in.

        Raises ViewRefusedError below the history floor and above the end, TooManyViewsError.
        """
        part = self._engine.partitions[vb_id]
        if seqno is None:
            seqno = part.high_seqno
        if not part.history_floor <= seqno <= part.high_seqno:
            raise ViewRefusedError(
                f"partition {vb_id} can be read as of seqnos {part.history_floor} to "
                f"{part.high_seqno}, "
                f"not {seqno}"
            )
        if len(self._open) >= self._views_max:
            self._make_room(owner)
        view = ReadView(self._engine, self._store, part, seqno)
        view.owner = owner
        view.opened_ns = self._now_ns
        part.pins.add(seqno)
        self._open[view] = None
        return view

    def _make_room(self, owner: str | None) -> None:
        """Close the oldest view of the owner who has the most. Raises TooManyViewsError if that
        would leave it with fewer than this owner has then.
        """
        counts = Counter(view.owner for view in self._open)
        greediest, most = counts.most_common(1)[0]
        if most <= counts[owner] + 1:
            raise TooManyViewsError(
                f"{len(self._open)} read views are open, as many as there may be, and "
                f"{counts[owner]} of them are this user's; try again when some are done"
            )
        oldest = next(view for view in self._open if view.owner == greediest)
        oldest.invalidate(
            f"{len(self._open)} read views were open, {most} of them this user's, and another user "
            "needed one; open another view when some are done"
        )
        self.close(oldest)

    def has_version(self, vb_id: int, seqno: int) -> bool:
        """Whether the version with exactly this seqno still exists."""
        return self._versions.entry_at(self._engine.partitions[vb_id], seqno) is not None

    def close(self, view: ReadView) -> None:
        """Close a view; closing it again does nothing."""
        if view in self._open:
            del self._open[view]
            self._engine.partitions[view.vb_id].pins.remove(view.seqno)
            view.invalidate("the view is closed")

    def tick(self, now_ns: int) -> None:
        """Close views that are too old or invalid; `now_ns` is monotonic time."""
        self._now_ns = now_ns
        for view in tuple(self._open):
            if view.opened_ns and now_ns - view.opened_ns > AGE_MAX_S * 1_000_000_000:
                view.invalidate(
                    f"the view of partition {view.vb_id} was open for {AGE_MAX_S} s, the longest "
                    "time; "
                    "open another one"
                )
            view.opened_ns = view.opened_ns or now_ns
            try:
                view.check()
            except ViewInvalidError:
                self.close(view)
        self._bound_pinned()

    def _bound_pinned(self) -> None:
        """Close the views that pin the most, until all of them pin PINNED_BYTES_MAX at most."""
        written: dict[tuple[int, int], int] = {}
        pinned: dict[int, int] = {}
        """Partition -> what its views pin, which is what the oldest one does."""
        for view in self._open:
            part = self._engine.partitions[view.vb_id]
            span = (view.vb_id, view.counted_seqno)
            if span not in written:
                written[span] = _bytes_since(part, view.counted_seqno)
            view.pinned_bytes += written[span]
            view.counted_seqno = part.high_seqno
            pinned[view.vb_id] = max(pinned.get(view.vb_id, 0), view.pinned_bytes)
        total_bytes = sum(pinned.values())
        while total_bytes > self._pinned_bytes_max:
            view = max(self._open, key=lambda each: each.pinned_bytes)
            view.invalidate(
                f"the view of partition {view.vb_id} kept compaction from freeing what was "
                "replaced since "
                f"it was opened: {view.pinned_bytes >> 20} MiB of changes, and all views together "
                f"may pin {self._pinned_bytes_max >> 20} MiB; open another one"
            )
            self.close(view)
            left = [each.pinned_bytes for each in self._open if each.vb_id == view.vb_id]
            total_bytes += max(left, default=0) - view.pinned_bytes


def _bytes_since(part: Partition, seqno: int) -> int:
    """Return the bytes of the changes above a seqno. Those that a merge has taken from memory since
    the last tick are counted like the others.
    """
    if part.high_seqno <= seqno:
        return 0
    counted_bytes = count = 0
    for layer in part.layers():
        entries = layer.between(seqno + 1, part.high_seqno)
        counted_bytes += sum(map(len, entries))
        count += len(entries)
    changes = part.high_seqno - seqno
    mean_bytes = counted_bytes // count if count else _UNSEEN_BYTES
    return counted_bytes + max(0, changes - count) * mean_bytes


def _meta_of(mutation: bytes) -> StoredMeta:
    opcode, _, datatype, _, cas, seqno, rev_seqno = META.unpack_from(mutation)
    flags, expiry = _FLAGS_AND_EXPIRY.unpack_from(mutation)
    return StoredMeta(opcode, datatype, cas, seqno, rev_seqno, flags, expiry)


class KeyWalk:
    """Walks all keys of a partition in steps, while it takes writes (flush, mending, random key).

    Every key that had a version at or below `end_seqno` when the walk began is returned at least
    once, more often if it has several versions in memory. Memory comes first. What a merge moves to
    the store meanwhile is found again there, so no key is missed.
    """

    def __init__(self, engine: Engine, vb_id: int, end_seqno: int) -> None:
        self._engine = engine
        self._vb_id = vb_id
        self._end_seqno = end_seqno
        self._next_seqno = 1
        """All versions in memory below it were visited."""
        self._after_key: bytes | None = None
        """The last key visited in the store; None: memory is not finished yet."""

    def take(self, keys_max: int) -> list[bytes]:
        """Return up to `keys_max` keys; an empty list means that all were visited. Raises
        StoreDamagedError.
        """
        if self._after_key is None:
            found = self._engine.versions.keys_in_memory(
                self._vb_id, self._next_seqno, self._end_seqno, keys_max
            )
            if found:
                self._next_seqno = found[-1][0] + 1
                return [key for _, key in found]
            self._after_key = b""
        keys = self._engine.versions.keys_in_store(self._vb_id, self._after_key, keys_max)
        if keys:
            self._after_key = keys[-1]
        return keys
