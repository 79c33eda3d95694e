"""The item cache: entries that the store has too, so that a read of them stays in memory. Sans-IO.

The dictionaries themselves are each partition's, `recent` and `older`, for the hot path reads them
directly; this module changes them, and bounds all of them together by one budget. What was read
since a partition's last turn is in `recent`; a look-up that finds its key in `older` moves it.
Where the budget is exceeded, the next partition in turn drops `older`, and `recent` takes its
place.

Who calls it: the engine (through `Keyspace` and `Versions`), the session's GET.

Invariants
- the active and the frozen layer are asked first. Of a key that neither holds, a cached entry is
  the newest version that the partition has in the store. What keeps this true:
    - an entry comes in when it was just read from the store for such a key (`add`), or when the
      frozen layer goes that a merge has brought into the store (`absorb`), which overwrites what
      is here. Nothing but a merge changes what the store says of a document's newest version;
    - every change of a key, and a rollback of one, puts it into the active layer at once, so what
      is here is hidden until the frozen layer that holds the change is absorbed. Whoever looks a
      key up in order to replace it takes it out (`take`): a superseded entry would waste room;
    - a partition that is emptied is emptied here, too (`clear`). Where nothing of the store is
      ours (merged_seqno 0), nothing is cached;
- no key is in both dictionaries of a partition;
- `held_bytes` is the sum over all entries of `cost`, and at most `bytes_max` after every call;
- no dictionary holds more than about GENERATION_BYTES_MAX, so that none takes long to grow or go.

A deletion's entry, or b"" for a key that is known not to exist, may be cached as well: it says that
there is no document. Of what it says beyond that, nothing is used, because compaction may have
dropped the tombstone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vbucket.engine.partition import Partition

ITEM_OVERHEAD_BYTES: Final = 140
"""What an entry takes beyond the bytes of entry and key: two objects of 33 bytes, rounded up to 16,
and 37 to 55 of a dictionary. Measured: docs/performance.md."""
GENERATION_BYTES_MAX: Final = 8 << 20
"""Of one dictionary: some 23,000 documents of 128 bytes, which grow, and go, in 1 ms."""


class ItemCache:
    """See the module. `bytes_max` 0: nothing is cached."""

    def __init__(self, partitions: Sequence[Partition], bytes_max: int) -> None:
        self._partitions = partitions
        self._hand = 0
        """The partition whose turn is next."""
        self.held_bytes = 0
        self.resize(bytes_max)
        self.hits = 0
        """Reads that found their key here."""
        self.misses = 0
        """Reads that had to ask the store."""

    def resize(self, bytes_max: int) -> None:
        """Set the budget."""
        self.bytes_max = bytes_max
        # Half, so that a partition alone does not lose all that it has at its turn.
        self._generation_bytes_max = min(GENERATION_BYTES_MAX, bytes_max // 2)
        self._shrink()

    def find(self, part: Partition, key: bytes) -> bytes | None:
        """Return a key's entry, None where it is not here. Neither layer holds the key."""
        entry = part.recent.get(key)
        if entry is None:
            entry = part.older.pop(key, None)
            if entry is None:
                return None
            part.recent[key] = entry
            size = len(entry) + len(key) + ITEM_OVERHEAD_BYTES
            part.older_bytes -= size
            part.recent_bytes += size
            if part.recent_bytes > self._generation_bytes_max:
                self._turn(part)
        self.hits += 1
        return entry

    def peek(self, part: Partition, key: bytes) -> bytes | None:
        """Return what `find` would, and leave everything as it is: nobody reads the document."""
        entry = part.recent.get(key)
        return part.older.get(key) if entry is None else entry

    def add(self, part: Partition, key: bytes, entry: bytes) -> None:
        """Keep what was just read from the store for a key that is neither here nor in a layer."""
        size = len(entry) + len(key) + ITEM_OVERHEAD_BYTES
        if size > self._generation_bytes_max:
            return
        assert part.merged_seqno, "what is in the store is this partition's"
        part.recent[key] = entry
        part.recent_bytes += size
        self.held_bytes += size
        if part.recent_bytes > self._generation_bytes_max:
            self._turn(part)
        if self.held_bytes > self.bytes_max:
            self._shrink()

    def take(self, part: Partition, key: bytes) -> bytes | None:
        """Remove a key that is about to change; return its entry, None where it was not here."""
        size = len(key) + ITEM_OVERHEAD_BYTES
        entry = part.recent.pop(key, None)
        if entry is not None:
            size += len(entry)
            part.recent_bytes -= size
        else:
            entry = part.older.pop(key, None)
            if entry is None:
                return None
            size += len(entry)
            part.older_bytes -= size
        self.held_bytes -= size
        return entry

    def absorb(self, part: Partition, newest: dict[bytes, bytes]) -> None:
        """Take over what a merge has brought into the store, instead of what is here of the keys.

        `newest` goes with its layer: it may be kept.
        """
        if not self.bytes_max:
            return
        for key in [*(part.recent.keys() & newest.keys()), *(part.older.keys() & newest.keys())]:
            self.take(part, key)
        size = len(newest) * ITEM_OVERHEAD_BYTES + sum(map(len, newest))
        size += sum(map(len, newest.values()))
        if not part.merged_seqno or size > self._generation_bytes_max:
            return
        if part.recent:
            part.recent.update(newest)
        else:
            part.recent = newest
        part.recent_bytes += size
        self.held_bytes += size
        if part.recent_bytes > self._generation_bytes_max:
            self._turn(part)
        self._shrink()

    def clear(self, part: Partition) -> None:
        """Forget a partition."""
        self.held_bytes -= part.recent_bytes + part.older_bytes
        part.recent, part.older = {}, {}
        part.recent_bytes = part.older_bytes = 0

    def _turn(self, part: Partition) -> None:
        """Drop what was not asked for since the last turn."""
        self.held_bytes -= part.older_bytes
        part.older, part.older_bytes = part.recent, part.recent_bytes
        part.recent, part.recent_bytes = {}, 0

    def _shrink(self) -> None:
        # Two rounds drop everything, so this ends.
        while self.held_bytes > self.bytes_max:
            self._turn(self._partitions[self._hand])
            self._hand = (self._hand + 1) % len(self._partitions)
        assert self.held_bytes >= 0, "what goes was counted when it came"
