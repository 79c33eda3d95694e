"""The engine: the commands on documents. Sans-IO.

    begin_batch(now)  sets the time of the operations that follow
    store, delete, put_with_meta, put_frames, get, meta, ...

Each change gets a seqno, a CAS and a revision here, and is encoded once. `vbucket.engine.keyspace`
keeps it, and has the invariants of commit groups.

Invariant: the highest CAS of a partition is at most `cas_drift_ns` ahead of the clock. It is
further ahead only if the clock was set back or an older version accepted such a CAS. While the
clock stands still, each change adds one nanosecond, which is less than the change takes.

Rules: kv_engine's semantics of CAS (hybrid clock) and of rev_seqno (it counts the revisions of a
document, deletions included, and stops at the highest value).
"""

from __future__ import annotations

from typing import Final, NamedTuple

from dcp.wire.status import RefusedError, Status
from dcp.wire.xattrs import DATATYPE_XATTR, body_at
from vbucket.engine.documents.json_value import datatype_of
from vbucket.engine.documents.kept_xattrs import KeptXattrs, with_xattrs
from vbucket.engine.documents.locks import Locks
from vbucket.engine.keyspace import DELETION, EXPIRATION, MUTATION, Keyspace
from vbucket.engine.loading.bulk import REV_SEQNO_MAX, Frames, are_new, winners
from vbucket.engine.loading.loads import Loads
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
    seqno_of,
)
from vbucket.model.ids import CAS_DRIFT_NS, Draws
from vbucket.native import get_run, set_run
from vbucket.store.environment import StoreDamagedError
from vbucket.store.key_record import StoredMeta
from vbucket.store.plain_value import plain
from vbucket.store.store import Store

_PACK_MUTATION: Final = MUTATION_ENTRY.pack
_PACK_DELETION: Final = DELETION_ENTRY.pack
_PACK_EXPIRATION: Final = EXPIRATION_ENTRY.pack
_UNPACK_META: Final = META.unpack_from
_UNPACK_NEWEST: Final = NEWEST.unpack_from
FLAGS_AT: Final = 52
_EXPIRY_AT: Final = 56
_NO_EXPIRY: Final = b"\0\0\0\0"

SET, ADD, REPLACE = 0, 1, 2
"""Modes of `Engine.store`: unconditional; only if absent; only if present."""

Outcome = tuple[int, int, int]
"""Status, CAS, seqno. CAS and seqno are 0 if nothing was changed."""

_NOT_MY_VBUCKET: Final[Outcome] = (Status.NOT_MY_VBUCKET, 0, 0)
_COME_BACK: Final[Outcome] = (Status.ETMPFAIL, 0, 0)
_MISSING: Final[Outcome] = (Status.KEY_ENOENT, 0, 0)
_EXISTS: Final[Outcome] = (Status.KEY_EEXISTS, 0, 0)
_CAS_INVALID: Final[Outcome] = (Status.CAS_VALUE_INVALID, 0, 0)
_LOCKED: Final[Outcome] = (Status.LOCKED, 0, 0)
_ABSENT: Final = StoredMeta(DELETION, 0, 0, 0, 0, 0, 0)
"""The metadata of a key that does not exist, and of a document that has just expired."""


class StoredDocument(NamedTuple):
    """What a GET answers with, without XATTRs. `flags` are the four bytes as stored."""

    cas: int
    flags: bytes
    value: bytes
    datatype: int


class Engine:
    """The commands on documents, over the partitions and groups of `keyspace`."""

    def __init__(
        self,
        store: Store,
        draws: Draws,
        num_vbuckets: int,
        memtable_bytes_max: int = 64 << 20,
        *,
        item_cache_bytes: int = 0,
    ) -> None:
        self.keyspace = keyspace = Keyspace(
            store, draws, num_vbuckets, memtable_bytes_max, item_cache_bytes=item_cache_bytes
        )
        # The keyspace never replaces these, so every command is spared a look there.
        self.num_vbuckets = num_vbuckets
        self.partitions = keyspace.partitions
        self.commits = keyspace.commits
        self.item_cache = keyspace.item_cache
        self.due = keyspace.due
        self.versions = keyspace.versions
        self.locks = Locks(draws)
        self.loads = Loads(keyspace)
        self._store = store
        self.set_run = set_run(
            keyspace.partitions, keyspace.versions.meta_below, store.key_tree,
            keyspace.item_cache, StoreDamagedError,
        )  # fmt: skip
        self.get_run = get_run(
            keyspace.partitions, store.read_trees, keyspace.item_cache.keep, StoreDamagedError
        )
        """These do plain changes and GETs in C; None: the loops are not built."""
        self.write_refusal = ""
        """Why no partition takes writes now, "" if they do."""
        self.writers_wait = False
        """Whether sessions hold commands that write, because there may soon be room again."""
        self.cas_drift_ns = CAS_DRIFT_NS
        """How far ahead of the clock a CAS from elsewhere may be."""
        self.expired_on_access = 0
        """Documents that expired because somebody asked for them."""
        self.flushes = 0
        """Flushes that were asked for."""
        self.gets = 0
        """Documents that clients asked for with GET and its forms, found or not."""
        self.streamed_seqnos = 0
        """Seqnos that streams went past. Versions that a snapshot leaves out count, too."""
        self._refusals: dict[Hold, str] = {}
        self.kept_xattrs = KeptXattrs(self.versions)
        self.now_ns = 0
        """The time of the operations of this batch, as a CAS has it: without the lowest 16 bits."""
        self.now_s = 0  # Unix time of this batch of operations
        self.first_open_ns = 0  # the lowest time that is not closed: `now_ns` is never below
        self.closed_max = 0  # the highest time that may be closed: a restart begins above it

    @property
    def cas_max(self) -> int:
        """The highest CAS that may come from elsewhere now."""
        return self.now_ns + self.cas_drift_ns

    def refuse_writes(self, why: str, hold: Hold = Hold.LOG_FULL) -> None:
        """Refuse all changes of documents with a temporary failure; `why` "" accepts them again.
        Pending changes stay pending, and reads go on.
        """
        if hold is Hold.STORE_BEHIND:
            self.writers_wait = False
        self._hold_all(hold, why)
        self._refusals[hold] = why
        self.write_refusal = next(filter(None, self._refusals.values()), "")

    def let_writers_wait(self) -> None:
        """Make sessions wait with commands that write, instead of refusing them. `refuse_writes`
        with Hold.STORE_BEHIND ends the wait, with a reason or with "".
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
        self.now_ns = max(now_ns & ~0xFFFF, self.first_open_ns)
        self.now_s = now_ns // 1_000_000_000
        self.locks.now_ns = now_ns
        if self.locks.held:
            self.locks.sweep_if_due()

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
        """Store a document. `body` is key and value, `expiry` absolute seconds (0 never). A `cas`
        other than 0 must be the document's own.
        """
        part = self.partitions[vb_id]
        if part.state != 1 or part.holds:
            return unwritable(part)
        known: StoredMeta | None = None
        if mode or cas or self.locks.held:
            known = self.meta_to_change(part, key)
            cas = self.locks.cas_to_match(part, key, known.seqno, known.cas, cas)
            if cas < 0 and mode != ADD:
                return _LOCKED
            refusal = refusal_of(mode, cas, known.cas, is_live=known.opcode == MUTATION)
            if refusal is not None:
                return refusal
            self.locks.unlock(part, key)
        # XATTRs are not in `body`: `put` adds those of the present document.
        bits = datatype_of(datatype & ~DATATYPE_XATTR, body, len(key))
        datatype = bits | datatype & DATATYPE_XATTR
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
        *,
        keeps_xattrs: bool = True,
    ) -> int:
        """Store a document unconditionally; return its CAS. Its seqno is `part.high_seqno` now.

        The caller has checked that the partition takes writes. `known` is the result of
        `meta_to_change`. `keeps_xattrs`: `body` has no XATTRs, and those of the present document
        stay. Nothing has changed if it raises: RefusedError if it grows too large with them.
        """
        entry = part.newest.get(key)
        if entry:
            opcode, old_datatype, prev_seqno, rev_seqno = _UNPACK_NEWEST(entry)
        elif known is not None:
            opcode, old_datatype, _, prev_seqno, rev_seqno, _, _ = known
            self.item_cache.take(part, key)
        else:
            below = self.versions.meta_below(part, key, entry)
            opcode, _, old_datatype, _, _, prev_seqno, rev_seqno = below
        # Up to 3: JSON and Snappy, no XATTRs. A literal, because every SET comes here.
        if old_datatype > 3 and opcode == MUTATION and keeps_xattrs:
            xattrs = self.kept_xattrs.of_document(part, key, self.now_s)
            if xattrs:
                datatype, value = plain(datatype, body[len(key) :])
                body = key + with_xattrs(xattrs, value)
                datatype |= DATATYPE_XATTR
        cas = self.now_ns
        if cas <= part.max_cas:
            cas = part.max_cas + 1
        seqno = part.high_seqno + 1
        entry = (
            _PACK_MUTATION(
                prev_seqno, part.leader_epoch, MUTATION_FORM, len(key), MUTATION_EXTRAS | datatype,
                part.vb_id, MUTATION_EXTRAS_BYTES + len(body), cas, seqno,
                rev_seqno + (rev_seqno < REV_SEQNO_MAX),
                flags, expiry,
            )
            + body
        )  # fmt: skip
        self.keyspace.apply(part, key, entry, seqno, opcode != MUTATION)
        part.max_cas = cas
        if expiry:
            self.due.active.add(expiry, entry)
        return cas

    def delete(self, vb_id: int, key: bytes, cas: int) -> Outcome:
        """Delete a document, leaving a tombstone with a seqno of its own."""
        part = self.partitions[vb_id]
        if part.state != 1 or part.holds:
            return unwritable(part)
        known = self.meta_to_change(part, key)
        if known.opcode != MUTATION:
            return _MISSING
        cas = self.locks.cas_to_match(part, key, known.seqno, known.cas, cas)
        if cas < 0:
            return _LOCKED
        if cas and cas != known.cas:
            return _EXISTS
        self.locks.unlock(part, key)
        self.item_cache.take(part, key)
        return self.remove(part, key, known)

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
        """Store or remove a document with a revision and a CAS (`new_cas`) from elsewhere.

        `body` is key and value. For a removal (`opcode` DELETION or EXPIRATION) it is the key, with
        the XATTRs that stay, and `expiry` is the time of the removal. A `cas` other than 0 must be
        the document's own.

        KEY_EEXISTS: the present version (perhaps a deletion) has a higher revision, or the same
        revision and no lower CAS (kv_engine's rule, conflict_resolution_mode seqno).
        CAS_VALUE_INVALID: the CAS is above `cas_max`. With `fits_meta` such a CAS is replaced, and
        counts as 0 in the conflict. A revision that is too high becomes the highest one.
        """
        part = self.partitions[vb_id]
        if part.state != 1 or part.holds:
            return unwritable(part)
        if keeps_cas and new_cas > self.cas_max:
            if not fits_meta:
                return _CAS_INVALID
            new_cas, keeps_cas = 0, False
        rev_seqno = min(rev_seqno, REV_SEQNO_MAX)
        entry = part.newest.get(key)
        known = _UNPACK_META(entry) if entry else self.versions.meta_below(part, key, entry)
        old_opcode, _, _, _, old_cas, prev_seqno, old_rev_seqno = known
        cas = self.locks.cas_to_match(part, key, prev_seqno, old_cas, cas)
        if cas < 0:
            return _LOCKED
        if cas:
            if old_opcode != MUTATION:
                return _MISSING
            if cas != old_cas:
                return _EXISTS
        if resolves_conflict and (rev_seqno, new_cas) <= (old_rev_seqno, old_cas):
            return _EXISTS
        if not keeps_cas:
            new_cas = max(self.now_ns, part.max_cas + 1)
        seqno = part.high_seqno + 1
        if opcode == MUTATION:
            datatype = datatype_of(datatype, body, len(key))
            head = _PACK_MUTATION(
                prev_seqno, part.leader_epoch, MUTATION_FORM, len(key), MUTATION_EXTRAS | datatype,
                vb_id, MUTATION_EXTRAS_BYTES + len(body), new_cas, seqno, rev_seqno,
                flags, expiry,
            )  # fmt: skip
        elif opcode == DELETION:
            head = _PACK_DELETION(
                prev_seqno, part.leader_epoch, 0x80, DELETION, len(key), DELETION_EXTRAS_BYTES,
                datatype, vb_id, DELETION_EXTRAS_BYTES + len(body), 0, new_cas, seqno, rev_seqno, 0,
            )  # fmt: skip
        else:
            head = _PACK_EXPIRATION(
                prev_seqno, part.leader_epoch, 0x80, EXPIRATION, len(key), EXPIRATION_EXTRAS_BYTES,
                datatype, vb_id, EXPIRATION_EXTRAS_BYTES + len(body), 0, new_cas, seqno,
                rev_seqno, expiry,
            )  # fmt: skip
        entry = head + body
        self.keyspace.apply(
            part, key, entry, seqno, (opcode == MUTATION) - (old_opcode == MUTATION)
        )
        part.max_cas = max(part.max_cas, new_cas)
        if opcode == MUTATION and expiry:
            self.due.active.add(expiry, entry)
        return 0, new_cas, seqno

    def put_frames(
        self, frames: Frames, *, resolves_conflict: bool = True, fits_meta: bool = False
    ) -> tuple[int, int, int, int]:
        """Do what `put_with_meta` does for each of these frames in order, keeping their CAS.

        Return the status, how many frames were applied, how many lost a conflict, and how many got
        another CAS. Without `fits_meta`, a CAS that is too high refuses the whole packet. Raises
        StoreDamagedError if data needed for a comparison is damaged. In both cases nothing was
        changed.
        """
        part = self.partitions[frames.vb_id]
        if part.state != 1 or part.holds:
            return unwritable(part)[0], 0, 0, 0
        has_far = max(frames.cas) > self.cas_max
        if has_far and not fits_meta:
            return Status.CAS_VALUE_INVALID, 0, 0, 0
        count, prev_seqnos, live = len(frames), None, None
        replaced: dict[int, int] = {}
        if has_far or not are_new(part, frames.keys):
            indexes, prev_seqnos, live, replaced = winners(
                self.versions, part, frames, cas_floor=self.now_ns, cas_max=self.cas_max,
                is_forced=not resolves_conflict,
            )  # fmt: skip
            if replaced:
                frames.replace_cas(replaced)
            if len(indexes) < count:
                frames = frames.only(indexes)
            if not indexes:
                return 0, 0, count, 0
        keys, opcodes = frames.keys, frames.opcodes
        first_seqno = part.high_seqno + 1
        entries = frames.entries(first_seqno, prev_seqnos, part.leader_epoch)
        self.keyspace.apply_many(part, keys, entries)
        part.max_cas = max(part.max_cas, *frames.cas)
        self._count_many(part, frames, live)
        if not frames.has_default_keys_only:
            manifest = self.keyspace.manifest
            for seqno, key in enumerate(keys, first_seqno):
                if key[0]:
                    part.tally.note(key, seqno, seqno - 1, manifest)
        if any(frames.expiries):
            add_due = self.due.active.add
            for opcode, expiry, entry in zip(opcodes, frames.expiries, entries, strict=True):
                if expiry and opcode == MUTATION:
                    add_due(expiry, entry)
        return 0, len(entries), count - len(entries), len(replaced)

    def _count_many(self, part: Partition, frames: Frames, live: list[bool] | None) -> None:
        """Count the documents of frames. `live` says which replace a document; None: none does."""
        if live is None and frames.has_default_keys_only:
            part.item_count += len(frames) - len(frames.removals)
            return
        was_live = live or [False] * len(frames)
        for key, opcode, before in zip(frames.keys, frames.opcodes, was_live, strict=True):
            if (opcode == MUTATION) != before:
                self.keyspace.count(part, key, -1 if before else 1)

    def get(self, vb_id: int, key: bytes) -> StoredDocument | int:
        """Return the newest version of a document, or the status that says why there is none."""
        part = self.partitions[vb_id]
        if part.state != 1:
            return unwritable(part)[0]
        entry = self.document_entry(part, key)
        if entry is None:
            return Status.KEY_ENOENT
        document = _document_of(entry)
        if self.locks.held:
            cas = self.locks.shown_cas(part, key, seqno_of(entry), document.cas)
            document = document._replace(cas=cas)
        return document

    def get_from_replica(self, part: Partition, key: bytes) -> StoredDocument | None:
        """Return a committed document whatever the partition's state; None: there is none, or it is
        due.
        """
        entry = self.versions.committed_entry(part, key)
        if not entry or entry[OPCODE_AT] != MUTATION:
            return None
        expiry = int.from_bytes(entry[_EXPIRY_AT : _EXPIRY_AT + 4], "big")
        return None if 0 < expiry <= self.now_s else _document_of(entry)

    def document_entry(self, part: Partition, key: bytes) -> bytes | None:
        """Return the newest version of a key, None if it is not a document. The partition must be
        active.
        """
        entry: bytes | None = part.newest.get(key)
        if entry is None:
            entry = self.versions.entry_below(part, key)
        if not entry or entry[OPCODE_AT] != MUTATION:
            return None
        if entry[_EXPIRY_AT : _EXPIRY_AT + 4] != _NO_EXPIRY and self.expire_if_due(part, key):
            return None
        return entry

    def meta(self, vb_id: int, key: bytes) -> StoredMeta | int:
        """Return the metadata of a key's newest version (perhaps a deletion), or the status that
        says why there is none.
        """
        part = self.partitions[vb_id]
        if part.state != 1:
            return unwritable(part)[0]
        if self.expire_if_due(part, key) and part.holds:
            return Status.KEY_ENOENT
        return self._newest_meta(part, key) or Status.KEY_ENOENT

    def newest_meta(self, vb_id: int, key: bytes) -> StoredMeta | None:
        """Return the metadata of a key's newest version, whether or not it is due; None: none."""
        return self._newest_meta(self.partitions[vb_id], key)

    def _newest_meta(self, part: Partition, key: bytes) -> StoredMeta | None:
        """Return the metadata of a key's newest version; None if there is none."""
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
        if key[0] and not self.keyspace.is_reachable(key):
            return
        meta = self.meta(vb_id, key)
        if not isinstance(meta, int) and meta.opcode == MUTATION and meta.seqno <= seqno:
            self.remove(self.partitions[vb_id], key, meta)

    def remove(
        self, part: Partition, key: bytes, known: StoredMeta, xattrs: bytes | None = None
    ) -> Outcome:
        """Leave a deletion of a key; `known` is its newest version, perhaps none or a deletion.
        `xattrs` is the section that the deletion keeps. None: the document's system XATTRs.
        """
        new_cas, seqno = max(self.now_ns, part.max_cas + 1), part.high_seqno + 1
        if xattrs is None:
            xattrs = self.kept_xattrs.of_removal(part, key, known)
        entry = (
            _PACK_DELETION(
                known.seqno, part.leader_epoch, 0x80, DELETION, len(key), DELETION_EXTRAS_BYTES,
                DATATYPE_XATTR if xattrs else 0,
                part.vb_id, DELETION_EXTRAS_BYTES + len(key) + len(xattrs), 0, new_cas, seqno,
                known.rev_seqno + (known.rev_seqno < REV_SEQNO_MAX), 0,
            )
            + key + xattrs
        )  # fmt: skip
        self.keyspace.apply(part, key, entry, seqno, -(known.opcode == MUTATION))
        part.max_cas = new_cas
        return 0, new_cas, seqno

    def _expire(self, part: Partition, key: bytes, known: StoredMeta) -> None:
        new_cas, seqno = max(self.now_ns, part.max_cas + 1), part.high_seqno + 1
        xattrs = self.kept_xattrs.of_removal(part, key, known)
        entry = (
            _PACK_EXPIRATION(
                known.seqno, part.leader_epoch, 0x80, EXPIRATION, len(key), EXPIRATION_EXTRAS_BYTES,
                DATATYPE_XATTR if xattrs else 0,
                part.vb_id, EXPIRATION_EXTRAS_BYTES + len(key) + len(xattrs), 0, new_cas, seqno,
                known.rev_seqno + (known.rev_seqno < REV_SEQNO_MAX),
                min(self.now_s, 0xFFFF_FFFF),
            )
            + key + xattrs
        )  # fmt: skip
        self.keyspace.apply(part, key, entry, seqno, -1)
        part.max_cas = new_cas

    def next_change(self, part: Partition) -> tuple[int, int]:
        """Return the CAS and the seqno that the next change of a partition gets in this batch."""
        return max(self.now_ns, part.max_cas + 1), part.high_seqno + 1

    def expire(self, vb_id: int, key: bytes) -> bool:
        """Remove a document that is due; the expiry is a change with its own seqno. Return False if
        there is no document or it is not due.
        """
        part = self.partitions[vb_id]
        meta = self._due_meta(part, key)
        if meta is None:
            return False
        self._expire(part, key, meta)
        return True

    def meta_to_change(self, part: Partition, key: bytes) -> StoredMeta:
        """Return the metadata of a key's newest version, for a caller that may replace it. One that
        does must remove it from the cache. A due document expires first. The partition must take
        writes.
        """
        known = self._newest_meta(part, key)
        if known is None:
            return _ABSENT
        if known.opcode == MUTATION and 0 < known.expiry <= self.now_s:
            self._expire(part, key, known)
            self.expired_on_access += 1
            return _ABSENT
        return known

    def expire_if_due(self, part: Partition, key: bytes) -> bool:
        """Expire a document that somebody asked for, if it is due; return whether it is. While the
        partition refuses writes, a due document counts as gone and expires later.

        Raises RefusedError if another node may be master before it can expire: by a clock that is
        behind, the document would be there again.
        """
        meta = self._due_meta(part, key)
        if meta is None:
            return False
        if Hold.REPLICATION in part.holds:
            why = part.holds[Hold.REPLICATION]
            raise RefusedError(Status.ETMPFAIL, f"the document is due, and cannot expire: {why}")
        if not part.holds:
            self._expire(part, key, meta)
            self.expired_on_access += 1
        return True

    def _due_meta(self, part: Partition, key: bytes) -> StoredMeta | None:
        meta = self._newest_meta(part, key)
        if meta is None or meta.opcode != MUTATION or not 0 < meta.expiry <= self.now_s:
            return None
        return meta


def _document_of(entry: bytes) -> StoredDocument:
    _, key_bytes, datatype, _, cas, _, _ = _UNPACK_META(entry)
    value = entry[MUTATION_KEY_AT + key_bytes :]
    if datatype & DATATYPE_XATTR:
        value, datatype = value[body_at(value) :], datatype & ~DATATYPE_XATTR
    return StoredDocument(cas, entry[FLAGS_AT : FLAGS_AT + 4], value, datatype)


def unwritable(part: Partition) -> Outcome:
    """Return why a partition takes no commands now, or no writes."""
    return _COME_BACK if part.durable_state == VbState.ACTIVE else _NOT_MY_VBUCKET


def refusal_of(mode: int, cas: int, old_cas: int, *, is_live: bool) -> Outcome | None:
    """Return why a conditional store is refused, or None. kv_engine's order of conditions."""
    if not is_live:
        return _MISSING if mode == REPLACE or cas else None
    if mode == ADD or (cas and cas != old_cas):
        return _EXISTS
    return None
