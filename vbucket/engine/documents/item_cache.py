"""The item cache: keeps entries of the store in memory, so that reads of them need no look-up.
Sans-IO.

Each partition has two dictionaries, `recent` and `older`, which the hot path reads directly. Only
this module changes them; one budget bounds all of them together. Entries that were used since the
partition's last turn are in `recent`; a look-up that finds its key in `older` moves it there. When
the budget is exceeded, the next partition in turn drops `older`, and `recent` becomes `older`.

Uniform writes to many more keys than fit would only push entries through the cache. So after a
merge that had to drop entries, what was merged since is compared with what was used: if less than
USED_SHARE_MIN of it was, the next SKIPPED_MERGES merges bring nothing into the cache. Then one does
again, and is judged again. Reads always fill it.

Who calls it: the engine (also through `Keyspace` and `Versions`), the session's GET.

Invariants
- the active and the frozen layer are asked first. For a key in neither of them, a cached entry is
  the newest version that the partition has in the store, because
    - entries come from two sources: they were just read from the store for such a key (`add`), or
      they are a frozen layer that a merge has brought into the store (`absorb`), which overwrites
      cached entries. Only a merge or a load changes the newest version of a key in the store;
    - every change or rollback of a key goes into the active layer at once. That hides the cached
      entry until the frozen layer with the change is absorbed. A caller that looks up a key to
      replace it removes the entry (`take`), because a superseded entry would waste memory;
    - emptying a partition empties its cache (`clear`). With merged_seqno 0 nothing is cached;
    - so does a load (`vbucket.engine.loading.loads`), which brings keys into the store without a
      merge: of some of them the cache may say that they do not exist;
- no key is in both dictionaries of a partition;
- `held_bytes` is the sum of the costs of all entries, and at most `bytes_max` after every call;
- no dictionary holds more than about GENERATION_BYTES_MAX, so none takes long to grow or to free.

The entry of a deletion, or b"" for a key that does not exist, may be cached, too. It only says that
there is no document. Its other fields are not used, because compaction may have dropped the
tombstone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from vbucket.engine.partition import Partition

ITEM_OVERHEAD_BYTES: Final = 140
"""Memory per entry beyond the bytes of entry and key: two objects of 33 bytes, rounded up to 16,
and 37 to 55 bytes of a dictionary. Measured in docs/decisions.md."""
GENERATION_BYTES_MAX: Final = 8 << 20
"""Limit of one dictionary: about 23,000 documents of 128 bytes, which are freed in 1 ms."""
USED_SHARE_MIN: Final = 0.25
"""Uses per entry that a merge brings in. An entry costs 0.3 us, and a use saves a write 2 us and a
read 5; the rest is the price of memory that is written and freed. docs/decisions.md."""
SKIPPED_MERGES: Final = 7
"""Merges that bring in nothing after one that did not pay: the trial costs an eighth."""


class ItemCache:
    """See the module. `bytes_max` 0: nothing is cached."""

    __slots__ = (
        "_absorbed", "_generation_bytes_max", "_hand", "_has_dropped", "_partitions",
        "_skips_left", "_used_before", "bytes_max", "held_bytes", "hits", "misses", "taken",
    )  # fmt: skip  # SetRun finds numbers in slots without a look-up

    def __init__(self, partitions: Sequence[Partition], bytes_max: int) -> None:
        self._partitions = partitions
        self._hand = 0
        """The partition whose turn is next."""
        self.held_bytes = 0
        self._has_dropped = False
        """Whether entries had to go since the last judgement."""
        self._absorbed = 0
        """Entries that merges brought in since then."""
        self._used_before = 0
        """Uses until then."""
        self._skips_left = 0
        """Merges that bring in nothing from now on."""
        self.hits = 0
        """Reads that found their key here."""
        self.misses = 0
        """Reads that had to ask the store."""
        self.taken = 0
        """Changes that found here what they replace."""
        self.resize(bytes_max)

    def resize(self, bytes_max: int, generation_bytes_max: int = GENERATION_BYTES_MAX) -> None:
        """Set the budget."""
        self.bytes_max = bytes_max
        # Half of the budget, so that a turn does not drop all entries of a single partition.
        self._generation_bytes_max = min(generation_bytes_max, bytes_max // 2)
        self._shrink()

    def find(self, part: Partition, key: bytes) -> bytes | None:
        """Return a key's entry, None if it is not cached. Neither layer has the key."""
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
        """Return what `find` would return, without counting it as a use."""
        entry = part.recent.get(key)
        return part.older.get(key) if entry is None else entry

    def add(self, part: Partition, key: bytes, entry: bytes) -> None:
        """Cache an entry just read from the store. The key is neither cached nor in a layer."""
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

    def keep(self, part: Partition, key: bytes, entry: bytes) -> None:
        """Do the same unless the key is cached: two reads that came together read it twice."""
        if key not in part.recent and key not in part.older:
            self.add(part, key, entry)

    def take(self, part: Partition, key: bytes) -> bytes | None:
        """Remove a key that is about to change; return its entry, None if it was not cached."""
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
        self.taken += 1
        return entry

    def begin_absorbing(self) -> None:
        """Judge the merges since the last judgement; a merge is about to bring in its entries."""
        used = self.hits + self.taken - self._used_before
        if self.is_skipping:
            self._skips_left -= 1
        elif self._has_dropped and used < self._absorbed * USED_SHARE_MIN:
            self.skip_merges()
        self._has_dropped = False
        self._absorbed = 0
        self._used_before += used

    @property
    def is_skipping(self) -> bool:
        """Whether merges bring in nothing at present."""
        return self._skips_left > 0

    def skip_merges(self) -> None:
        """Bring in nothing with the next merges."""
        self._skips_left = SKIPPED_MERGES

    def absorb(self, part: Partition, newest: dict[bytes, bytes]) -> None:
        """Cache the entries that a merge has brought into the store, replacing those cached before.

        `newest` belongs to a layer that is dropped, so the dictionary may be kept.
        """
        if not self.bytes_max:
            return
        taken = self.taken
        for key in [*(part.recent.keys() & newest.keys()), *(part.older.keys() & newest.keys())]:
            self.take(part, key)
        self.taken = taken
        if self.is_skipping:
            return
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
        self._absorbed += len(newest)
        if part.recent_bytes > self._generation_bytes_max:
            self._turn(part)
        self._shrink()

    def clear(self, part: Partition) -> None:
        """Drop all entries of a partition."""
        self.held_bytes -= part.recent_bytes + part.older_bytes
        part.recent, part.older = {}, {}
        part.recent_bytes = part.older_bytes = 0

    def _turn(self, part: Partition) -> None:
        """Drop the entries that were not used since the last turn."""
        self.held_bytes -= part.older_bytes
        self._has_dropped |= part.older_bytes > 0
        part.older, part.older_bytes = part.recent, part.recent_bytes
        part.recent, part.recent_bytes = {}, 0

    def _shrink(self) -> None:
        for _ in range(2 * len(self._partitions)):
            if self.held_bytes <= self.bytes_max:
                break
            self._turn(self._partitions[self._hand])
            self._hand = (self._hand + 1) % len(self._partitions)
        else:
            # Two rounds have dropped everything. A rest was never held, so no turn could drop it.
            self.held_bytes = 0
        assert self.held_bytes >= 0, "every entry was counted when it was added"
