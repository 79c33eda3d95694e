"""The engine: batches of operations in, one log record per commit group out. Sans-IO.

The shell that owns it works in this order, and the types keep it to that:

    begin_batch(now)  store/delete/get ...   the operations of one read
    take_group() -> Group                    everything since the last group, for one log record
        the shell appends `record` to the log and syncs it
    group_committed(group)                   answers that waited for group.number may leave,
                                             streams of group.high_seqnos have something to send

and, when `wants_freeze`, at a group boundary: freeze(), rotate the log, merge the sealed segments
into the store, then merged(report) and drop_frozen() in slices.

The invariants of groups are `vbucket.engine.keyspace`'s.

Invariant: a partition's highest CAS is at most `cas_drift_ns` ahead of the clock, but where the
clock was set back, or an older version took a CAS from further ahead. Changes of its own add a
nanosecond each while the clock stands still, and each takes longer than that.

Rules: architecture of the write path, kv_engine's semantics of CAS (hybrid clock), rev_seqno
(counts a document's revisions, deletes included; the highest stays) and failover tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from dcp.wire.status import Status
from vbucket.engine.bulk import REV_SEQNO_MAX, Frames
from vbucket.engine.keyspace import DELETION, EXPIRATION, MUTATION, Keyspace
from vbucket.engine.partition import Hold, Partition, VbState
from vbucket.model.entry import (
    DELETION_ENTRY,
    DELETION_EXTRAS_BYTES,
    EXPIRATION_ENTRY,
    EXPIRATION_EXTRAS_BYTES,
    META,
    MUTATION_ENTRY,
    MUTATION_EXTRAS,
    MUTATION_EXTRAS_BYTES,
    MUTATION_FORM,
    MUTATION_KEY_AT,
    NEWEST,
    OPCODE_AT,
    key_of,
    seqno_of,
)
from vbucket.model.ids import CAS_DRIFT_NS
from vbucket.model.manifest import collection_of
from vbucket.store.key_record import StoredMeta

_PACK_MUTATION: Final = MUTATION_ENTRY.pack
_PACK_DELETION: Final = DELETION_ENTRY.pack
_PACK_EXPIRATION: Final = EXPIRATION_ENTRY.pack
_UNPACK_META: Final = META.unpack_from
_UNPACK_NEWEST: Final = NEWEST.unpack_from
FLAGS_AT: Final = 52
_EXPIRY_AT: Final = 56
_NO_EXPIRY: Final = b"\0\0\0\0"

SET, ADD, REPLACE = 0, 1, 2
"""Modes of `Engine.store`: whatever is there; only if absent; only if present."""

Outcome = tuple[int, int, int]
"""Status, CAS, seqno. CAS and seqno are 0 where nothing was changed."""

_NOT_MY_VBUCKET: Final[Outcome] = (Status.NOT_MY_VBUCKET, 0, 0)
_COME_BACK: Final[Outcome] = (Status.ETMPFAIL, 0, 0)
_MISSING: Final[Outcome] = (Status.KEY_ENOENT, 0, 0)
_EXISTS: Final[Outcome] = (Status.KEY_EEXISTS, 0, 0)
_CAS_INVALID: Final[Outcome] = (Status.CAS_VALUE_INVALID, 0, 0)
_ABSENT: Final = StoredMeta(DELETION, 0, 0, 0, 0, 0, 0)
"""What is known of a key that never was, and of a document that has just expired."""


class StoredDocument(NamedTuple):
    """What a GET answers with. `flags` are the four bytes as stored."""

    cas: int
    flags: bytes
    value: bytes
    datatype: int


class Engine(Keyspace):
    """All partitions of a node, and the commands on their documents."""

    write_refusal = ""
    """Why no partition takes writes now; "" where that is not so."""
    writers_wait = False
    """Whether sessions should wait with commands that write: there may soon be room again."""
    cas_drift_ns = CAS_DRIFT_NS
    """How far ahead of the clock a CAS from elsewhere may be."""

    @property
    def now_ns(self) -> int:
        """The time of the operations of this batch."""
        return self._cas_floor

    @property
    def cas_max(self) -> int:
        """The highest CAS that may come from elsewhere now."""
        return self._cas_floor + self.cas_drift_ns

    def refuse_writes(self, why: str, hold: Hold = Hold.LOG_FULL) -> None:
        """Refuse all changes of documents as a temporary failure from now on; "": take them again.

        What was taken before stays pending, and reads go on.
        """
        if hold is Hold.STORE_BEHIND:
            self.writers_wait = False
        self._hold_all(hold, why)
        self._refusals[hold] = why
        self.write_refusal = next(filter(None, self._refusals.values()), "")

    def let_writers_wait(self) -> None:
        """Hold writers back for a while: sessions wait with what writes, instead of refusing it.

        `refuse_writes` with Hold.STORE_BEHIND ends the wait, with a reason or with "".
        """
        self.writers_wait = True
        self._hold_all(Hold.STORE_BEHIND, "writers wait until the store has caught up")

    def _hold_all(self, hold: Hold, why: str) -> None:
        for part in self.partitions:
            if why:
                part.hold_writes(hold, why)
            else:
                part.release_writes(hold)

    def begin_batch(self, now_ns: int) -> None:
        """Set the time of the operations that follow; `now_ns` since the Unix epoch."""
        self._cas_floor = now_ns & ~0xFFFF
        self._now_s = now_ns // 1_000_000_000

    def store(
        self,
        mode: int,
        vb_id: int,
        key: bytes,
        body: bytes,
        flags: int,
        expiry: int,
        datatype: int,
        cas: int,
    ) -> Outcome:
        """Store a document. `body` is key and value, `expiry` absolute seconds (0 never).

        A `cas` other than 0 must be the document's own.
        """
        part = self.partitions[vb_id]
        if part.state != 1 or part.is_backed_up:
            return _unwritable(part)
        known: StoredMeta | None = None
        if mode or cas:
            known = self._meta_to_change(part, key)
            refusal = _refusal(mode, cas, known.cas, is_live=known.opcode == MUTATION)
            if refusal is not None:
                return refusal
        return 0, self.put(part, key, body, flags, expiry, datatype, known), part.high_seqno

    def put(
        self,
        part: Partition,
        key: bytes,
        body: bytes,
        flags: int,
        expiry: int,
        datatype: int,
        known: StoredMeta | None = None,
    ) -> int:
        """Store a document whatever is there; return its CAS. The partition takes writes; the
        document's seqno is its newest one now. Where it raises, nothing was changed.

        `known`: what `_meta_to_change` said. What `_applied` does stands here once more: this is
        what every SET costs.
        """
        entry = part.newest.get(key)
        if entry:
            opcode, prev_seqno, rev_seqno = _UNPACK_NEWEST(entry)
        elif known is not None:
            opcode, prev_seqno, rev_seqno = known.opcode, known.seqno, known.rev_seqno
            self.item_cache.take(part, key)
        else:
            opcode, _, _, _, _, prev_seqno, rev_seqno = self._versions.meta_below(part, key, entry)
        cas = self._cas_floor
        if cas <= part.max_cas:
            cas = part.max_cas + 1
        seqno = part.high_seqno + 1
        entry = (
            _PACK_MUTATION(
                prev_seqno, part.epoch, MUTATION_FORM, len(key), MUTATION_EXTRAS | datatype,
                part.vb_id, MUTATION_EXTRAS_BYTES + len(body), cas, seqno,
                rev_seqno + (rev_seqno < REV_SEQNO_MAX),
                flags, expiry,
            )
            + body
        )  # fmt: skip
        self._pending.append(entry)
        part.append_entry(entry)
        part.newest[key] = entry
        part.high_seqno = seqno
        part.max_cas = cas
        if part.last_group != self.group:
            part.last_group = self.group
            self._touched.append(part)
        if opcode != MUTATION:
            part.item_count += 1
            if key[0]:
                part.tally.count(collection_of(key), 1)
        if key[0]:
            part.tally.note(key, seqno, seqno - 1, self.manifest.collections)
        if expiry:
            self.due.active.add(expiry, entry)
        return cas

    def delete(self, vb_id: int, key: bytes, cas: int) -> Outcome:
        """Delete a document, leaving a tombstone with a seqno of its own."""
        part = self.partitions[vb_id]
        if part.state != 1 or part.is_backed_up:
            return _unwritable(part)
        known = self._meta_to_change(part, key)
        if known.opcode != MUTATION:
            return _MISSING
        if cas and cas != known.cas:
            return _EXISTS
        self.item_cache.take(part, key)
        return self._delete(part, key, known.seqno, known.rev_seqno)

    def put_with_meta(
        self,
        opcode: int,
        vb_id: int,
        key: bytes,
        body: bytes,
        flags: int,
        expiry: int,
        datatype: int,
        rev_seqno: int,
        new_cas: int,
        cas: int,
        *,
        resolves_conflict: bool = True,
        keeps_cas: bool = True,
        fits_meta: bool = False,
    ) -> Outcome:
        """Store or remove a document with a revision and a CAS (`new_cas`) from elsewhere. `body`
        is key and value; of a removal (`opcode` DELETION or EXPIRATION) the key alone, and `expiry`
        is its time. A `cas` other than 0 must be the document's own.

        KEY_EEXISTS: what is there, a deletion too, has a higher revision, or the same and a CAS
        that is not lower (kv_engine's rule, conflict_resolution_mode seqno). CAS_VALUE_INVALID: the
        CAS is above `cas_max`. With `fits_meta` it is replaced then, and says nothing in a
        conflict; a revision that is too high becomes the highest.
        """
        part = self.partitions[vb_id]
        if part.state != 1 or part.is_backed_up:
            return _unwritable(part)
        if keeps_cas and new_cas > self.cas_max:
            if not fits_meta:
                return _CAS_INVALID
            new_cas, keeps_cas = 0, False
        rev_seqno = min(rev_seqno, REV_SEQNO_MAX)
        entry = part.newest.get(key)
        known = _UNPACK_META(entry) if entry else self._versions.meta_below(part, key, entry)
        old_opcode, _, _, _, old_cas, prev_seqno, old_rev_seqno = known
        if cas:
            if old_opcode != MUTATION:
                return _MISSING
            if cas != old_cas:
                return _EXISTS
        if resolves_conflict and (rev_seqno, new_cas) <= (old_rev_seqno, old_cas):
            return _EXISTS
        if not keeps_cas:
            new_cas = max(self._cas_floor, part.max_cas + 1)
        seqno = part.high_seqno + 1
        if opcode == MUTATION:
            head = _PACK_MUTATION(
                prev_seqno, part.epoch, MUTATION_FORM, len(key), MUTATION_EXTRAS | datatype,
                vb_id, MUTATION_EXTRAS_BYTES + len(body), new_cas, seqno, rev_seqno,
                flags, expiry,
            )  # fmt: skip
        elif opcode == DELETION:
            head = _PACK_DELETION(
                prev_seqno, part.epoch, 0x80, DELETION, len(key), DELETION_EXTRAS_BYTES, 0,
                vb_id, DELETION_EXTRAS_BYTES + len(key), 0, new_cas, seqno, rev_seqno, 0,
            )  # fmt: skip
        else:
            head = _PACK_EXPIRATION(
                prev_seqno, part.epoch, 0x80, EXPIRATION, len(key), EXPIRATION_EXTRAS_BYTES, 0,
                vb_id, EXPIRATION_EXTRAS_BYTES + len(key), 0, new_cas, seqno, rev_seqno, expiry,
            )  # fmt: skip
        self._applied(part, key, head + body, seqno)
        part.max_cas = max(part.max_cas, new_cas)
        if (opcode == MUTATION) != (old_opcode == MUTATION):
            self.count(part, key, 1 if opcode == MUTATION else -1)
        if opcode == MUTATION and expiry:
            self.due.active.add(expiry, head + body)
        return 0, new_cas, seqno

    def put_frames(
        self, frames: Frames, *, resolves_conflict: bool = True, fits_meta: bool = False
    ) -> tuple[int, int, int, int]:
        """Do what `put_with_meta` does, for each of these frames in order, keeping their CAS.

        Return status, how many were applied, how many lost against what is there, and of how many
        the CAS was replaced. Nothing was changed where one has a CAS that is too high and
        `fits_meta` is not given, and where data that it has to compare with is damaged
        (StoreDamagedError).
        """
        part = self.partitions[frames.vb_id]
        if part.state != 1 or part.is_backed_up:
            return _unwritable(part)[0], 0, 0, 0
        has_far = max(frames.cas) > self.cas_max
        if has_far and not fits_meta:
            return Status.CAS_VALUE_INVALID, 0, 0, 0
        count, prev_seqnos, live = len(frames), None, None
        replaced: dict[int, int] = {}
        if has_far or not _are_new(part, frames.keys):
            indexes, prev_seqnos, live, replaced = self._winners(
                part, frames, is_forced=not resolves_conflict
            )
            if replaced:
                frames.replace_cas(replaced)
            if len(indexes) < count:
                frames = frames.only(indexes)
            if not indexes:
                return 0, 0, count, 0
        keys, opcodes = frames.keys, frames.opcodes
        first_seqno = part.high_seqno + 1
        entries = frames.entries(first_seqno, prev_seqnos, part.epoch)
        self._applied_many(part, keys, entries)
        part.max_cas = max(part.max_cas, *frames.cas)
        self._count_many(part, frames, live)
        if not frames.has_default_keys_only:
            known = self.manifest.collections
            for seqno, key in enumerate(keys, first_seqno):
                if key[0]:
                    part.tally.note(key, seqno, seqno - 1, known)
        if any(frames.expiries):
            add_due = self.due.active.add
            for opcode, expiry, entry in zip(opcodes, frames.expiries, entries, strict=True):
                if expiry and opcode == MUTATION:
                    add_due(expiry, entry)
        return 0, len(entries), count - len(entries), len(replaced)

    def _count_many(self, part: Partition, frames: Frames, live: list[bool] | None) -> None:
        """Count the documents of frames; `live`: which of them replace one, None: none does."""
        if live is None and frames.has_default_keys_only:
            part.item_count += len(frames) - len(frames.removals)
            return
        was_live = live or [False] * len(frames)
        for key, opcode, before in zip(frames.keys, frames.opcodes, was_live, strict=True):
            if (opcode == MUTATION) != before:
                self.count(part, key, -1 if before else 1)

    def _applied_many(self, part: Partition, keys: Sequence[bytes], entries: list[bytes]) -> None:
        self._pending += entries
        part.active.entries += entries
        part.newest.update(zip(keys, entries, strict=True))
        part.high_seqno += len(entries)
        if part.last_group != self.group:
            part.last_group = self.group
            self._touched.append(part)

    def _winners(
        self, part: Partition, frames: Frames, *, is_forced: bool
    ) -> tuple[list[int], list[int], list[bool], dict[int, int]]:
        """Return the indexes of the frames that win against what is there, the seqno that each
        replaces, whether it replaces a document, and, by index, the CAS of those whose own is too
        high: that says nothing in a conflict. Reads, changes nothing.
        """
        below, newest, cas_max = self._versions.meta_below, part.newest, self.cas_max
        known: dict[bytes, tuple[int, int, int, int]] = {}
        indexes: list[int] = []
        prev_seqnos: list[int] = []
        live: list[bool] = []
        replaced: dict[int, int] = {}
        seqno, newest_cas = part.high_seqno, part.max_cas
        rows = zip(frames.keys, frames.opcodes, frames.rev_seqnos, frames.cas, strict=True)
        for index, (key, opcode, rev_seqno, own_cas) in enumerate(rows):
            old = known.get(key)
            if old is None:
                entry = newest.get(key)
                meta = _UNPACK_META(entry) if entry else below(part, key, entry)
                old = (meta[0], meta[4], meta[5], meta[6])
            old_opcode, old_cas, prev_seqno, old_rev_seqno = old
            cas = own_cas if own_cas <= cas_max else 0
            if not is_forced and (rev_seqno, cas) <= (old_rev_seqno, old_cas):
                known[key] = old
                continue
            if not cas:
                replaced[index] = cas = max(self._cas_floor, newest_cas + 1)
            newest_cas = max(newest_cas, cas)
            seqno += 1
            known[key] = (opcode, cas, seqno, rev_seqno)
            indexes.append(index)
            prev_seqnos.append(prev_seqno)
            live.append(old_opcode == MUTATION)
        return indexes, prev_seqnos, live, replaced

    def get(self, vb_id: int, key: bytes) -> StoredDocument | int:
        """Return the newest applied document, or the status that says why there is none."""
        part = self.partitions[vb_id]
        if part.state != 1:
            return Status.NOT_MY_VBUCKET
        entry = self.document_entry(part, key)
        if entry is None:
            return Status.KEY_ENOENT
        _, key_bytes, datatype, _, cas, _, _ = _UNPACK_META(entry)
        return StoredDocument(
            cas,
            entry[FLAGS_AT : FLAGS_AT + 4],
            entry[MUTATION_KEY_AT + key_bytes :],
            datatype,
        )

    def document_entry(self, part: Partition, key: bytes) -> bytes | None:
        """Return the newest version of a key, applied or older, None where it is no document (any
        more). The partition is active.
        """
        entry: bytes | None = part.newest.get(key)
        if entry is None:
            entry = self._versions.entry_below(part, key)
        if not entry or entry[OPCODE_AT] != MUTATION:
            return None
        if entry[_EXPIRY_AT : _EXPIRY_AT + 4] != _NO_EXPIRY and self.expire_if_due(part, key):
            return None
        return entry

    def meta(self, vb_id: int, key: bytes) -> StoredMeta | int:
        """Return all but the value of a key's newest version, a deletion too, or the status that
        says why there is none.
        """
        part = self.partitions[vb_id]
        if part.state != 1:
            return Status.NOT_MY_VBUCKET
        if self.expire_if_due(part, key) and part.is_backed_up:
            return Status.KEY_ENOENT
        return self._newest_meta(part, key) or Status.KEY_ENOENT

    def newest_meta(self, vb_id: int, key: bytes) -> StoredMeta | None:
        """Return what is known of a key's newest version, due or not; None: nothing."""
        return self._newest_meta(self.partitions[vb_id], key)

    def _newest_meta(self, part: Partition, key: bytes) -> StoredMeta | None:
        """Return what is known of a key's newest version, without its value; None: nothing."""
        entry: bytes | None = part.newest.get(key)
        if entry is None and part.frozen is not None:
            entry = part.frozen.newest.get(key)
        if entry is None and part.merged_seqno:
            entry = self.item_cache.peek(part, key)
            if not entry or entry[OPCODE_AT] != MUTATION:
                return self._store.meta(part.vb_id, key)
        if not entry:
            return None
        opcode, _, datatype, _, cas, seqno, rev_seqno = _UNPACK_META(entry)
        flags = expiry = 0
        if opcode == MUTATION:
            flags = int.from_bytes(entry[FLAGS_AT : FLAGS_AT + 4], "big")
            expiry = int.from_bytes(entry[_EXPIRY_AT : _EXPIRY_AT + 4], "big")
        return StoredMeta(opcode, datatype, cas, seqno, rev_seqno, flags, expiry)

    def delete_up_to(self, vb_id: int, key: bytes, seqno: int) -> None:
        """Delete a document if its newest version is not above `seqno`."""
        if key[0] and not self.is_reachable(key):
            return
        meta = self.meta(vb_id, key)
        if not isinstance(meta, int) and meta.opcode == MUTATION and meta.seqno <= seqno:
            self._delete(self.partitions[vb_id], key, meta.seqno, meta.rev_seqno)

    def keys_in_memory(
        self, vb_id: int, start_seqno: int, end_seqno: int, limit: int
    ) -> list[tuple[int, bytes]]:
        """Return up to `limit` (seqno, key) of the versions in [start, end] that are not merged."""
        found: list[tuple[int, bytes]] = []
        for layer in self.partitions[vb_id].layers():
            entries = layer.entries
            for index in range(layer.position_of(start_seqno), len(entries)):
                entry = entries[index]
                seqno = seqno_of(entry)
                if seqno > end_seqno or len(found) == limit:
                    return found
                found.append((seqno, key_of(entry)))
        return found

    def keys_in_store(self, vb_id: int, after: bytes, limit: int) -> list[bytes]:
        """Return up to `limit` merged keys > `after`, ascending; deleted ones too."""
        return self._store.keys(vb_id, after, limit) if self.partitions[vb_id].merged_seqno else []

    def _delete(self, part: Partition, key: bytes, prev_seqno: int, rev_seqno: int) -> Outcome:
        new_cas, seqno = max(self._cas_floor, part.max_cas + 1), part.high_seqno + 1
        entry = (
            _PACK_DELETION(
                prev_seqno, part.epoch, 0x80, DELETION, len(key), DELETION_EXTRAS_BYTES, 0,
                part.vb_id, DELETION_EXTRAS_BYTES + len(key), 0, new_cas, seqno,
                rev_seqno + (rev_seqno < REV_SEQNO_MAX), 0,
            )
            + key
        )  # fmt: skip
        self._applied_removal(part, key, entry, new_cas, seqno)
        return 0, new_cas, seqno

    def _expire(self, part: Partition, key: bytes, prev_seqno: int, rev_seqno: int) -> None:
        new_cas, seqno = max(self._cas_floor, part.max_cas + 1), part.high_seqno + 1
        entry = (
            _PACK_EXPIRATION(
                prev_seqno, part.epoch, 0x80, EXPIRATION, len(key), EXPIRATION_EXTRAS_BYTES, 0,
                part.vb_id, EXPIRATION_EXTRAS_BYTES + len(key), 0, new_cas, seqno,
                rev_seqno + (rev_seqno < REV_SEQNO_MAX),
                min(self._now_s, 0xFFFF_FFFF),
            )
            + key
        )  # fmt: skip
        self._applied_removal(part, key, entry, new_cas, seqno)

    def _applied_removal(
        self, part: Partition, key: bytes, entry: bytes, new_cas: int, seqno: int
    ) -> None:
        self._applied(part, key, entry, seqno)
        part.max_cas = new_cas
        self.count(part, key, -1)

    def expire(self, vb_id: int, key: bytes) -> bool:
        """Remove a document whose time is over: an expiry is a change with a seqno of its own.

        False: it is not over, or there is no document.
        """
        part = self.partitions[vb_id]
        meta = self._due_meta(part, key)
        if meta is None:
            return False
        self._expire(part, key, meta.seqno, meta.rev_seqno)
        return True

    def _meta_to_change(self, part: Partition, key: bytes) -> StoredMeta:
        """Return what is known of a key's newest version, for who may replace it; who does takes it
        out of the cache. A document whose time is over expires first. The partition takes writes.
        """
        known = self._newest_meta(part, key)
        if known is None:
            return _ABSENT
        if known.opcode == MUTATION and 0 < known.expiry <= self._now_s:
            self._expire(part, key, known.seqno, known.rev_seqno)
            self.expired_on_access += 1
            return _ABSENT
        return known

    def expire_if_due(self, part: Partition, key: bytes) -> bool:
        """Do so because somebody asked for the document; where writers are held back, it is as
        good as gone, and the change is made later.
        """
        meta = self._due_meta(part, key)
        if meta is None:
            return False
        if not part.is_backed_up:
            self._expire(part, key, meta.seqno, meta.rev_seqno)
            self.expired_on_access += 1
        return True

    def _due_meta(self, part: Partition, key: bytes) -> StoredMeta | None:
        meta = self._newest_meta(part, key)
        if meta is None or meta.opcode != MUTATION or not 0 < meta.expiry <= self._now_s:
            return None
        return meta


def _are_new(part: Partition, keys: Sequence[bytes]) -> bool:
    """Whether each key is there once, and was never in the partition. False: perhaps not."""
    if part.merged_seqno:
        return False
    distinct = set(keys)
    return len(distinct) == len(keys) and all(
        layer.newest.keys().isdisjoint(distinct) for layer in part.layers()
    )


def _unwritable(part: Partition) -> Outcome:
    """Return why a partition takes no writes."""
    return _COME_BACK if part.state == VbState.ACTIVE else _NOT_MY_VBUCKET


def _refusal(mode: int, cas: int, old_cas: int, *, is_live: bool) -> Outcome | None:
    """Return why a conditional store is refused, or None. kv_engine's order of conditions."""
    if not is_live:
        return _MISSING if mode == REPLACE or cas else None
    if mode == ADD or (cas and cas != old_cas):
        return _EXISTS
    return None
