"""Documents for operators: look one up, its history, the keys with a prefix, changes.

The admin interface calls it. Reads take the versions from the engine, so they also work while
writes are refused. Changes go through a session of their own, with the rights of the user who asks.
So every rule of SET and DELETE holds (locks, CAS, collections, limits, XATTRs that are kept), but
the faults of the test bench do not apply.

An answer tells only what is committed. A search reads a view of committed changes. Other answers
wait for the commit, as the answer to a GET does; without a commit, reads are refused after a short
time, because a full disk can delay it for hours.

Invariants
- one request does a bounded amount of work, and lets other work run in between. A search may go on
  to the end of a partition in which it has found nothing;
- a key or value is told only to a user who may read that key.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from bisect import insort
from operator import itemgetter
from struct import Struct
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from dcp.server.net.sessions import Sessions
from dcp.server.operate.moments import NotKeptError, seqno_at
from dcp.server.operate.reports import Cas, Count, Encoding, Seqno, UnixTime, VbId
from dcp.server.storage.merging import Merging
from dcp.server.storage.waiters import CommitWaiters
from dcp.session.access.rights import Rights
from dcp.session.faults import FaultTable
from dcp.session.session import Session
from dcp.session.state import SessionState
from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from dcp.wire.xattrs import is_system, section_of, unpack_xattrs
from vbucket.engine.engine import Engine
from vbucket.engine.partition import Partition
from vbucket.engine.read_view import Shown, ViewInvalidError, Views
from vbucket.model.entry import (
    META,
    OPCODE_AT,
    expiry_of,
    key_of,
    prev_seqno_of,
    seqno_of,
    value_of,
)
from vbucket.model.ids import vbucket_of
from vbucket.model.manifest import collection_of, decode_leb128, encode_leb128
from vbucket.store.environment import StoreDamagedError
from vbucket.store.plain_value import plain, plain_body

VALUE_BYTES_SHOWN: Final = 256 * 1024
"""Longer values are cut. A browser shows this much text without trouble."""
VERSIONS_AT_ONCE: Final = 50
HISTORY_BYTES: Final = 1 << 20
"""Values and XATTRs of one answer of `history`; one version may go beyond."""
HISTORY_WORK: Final = 10_000
"""Versions that one request for a history looks at: 0.1 s."""
KEYS_AT_ONCE: Final = 200
PREVIEW_BYTES: Final = 400
"""Bytes of a value in a list."""
PAGE_TIME_S: Final = 10.0
"""Time of one request for sorted documents. It looks into every partition: some 0.2 s, and longer
where the user may not read most of the keys."""
SCAN_STEP_WORK: Final = 200
"""Keys and versions between two turns of the loop: 1 to 2 ms."""
SCAN_TIME_S: Final = 0.5
"""Time of one request for keys. A rare prefix needs several requests, so the page can show how far
it is, and can stop."""
SCANS_MAX: Final = 4
"""Scans at a time, so that they take a part of the loop's time only."""
KEY_BYTES_MAX: Final = 250
COMMIT_WAIT_S: Final = 2.0
"""How long a read waits for a commit. Reads that wait take places of the admin port."""
ROOM_WAIT_S: Final = 0.25
"""How often a change that waits for room looks again."""
ROOM_LIMIT_S: Final = 30.0
"""A person waits no longer than this, whatever the setting write_wait says."""

_FEATURES: Final = (
    Feature.COLLECTIONS, Feature.JSON, Feature.XERROR, Feature.MUTATION_SEQNO,
)  # fmt: skip
_OWNER: Final = "(listings)"
"""What its read views count for: no user has this name."""
_STORE_EXTRAS: Final = Struct(">II")
_FLAGS_AT: Final = Struct(">52xI")
KINDS: Final = {
    int(Opcode.DCP_MUTATION): "set",
    int(Opcode.DCP_DELETION): "deleted",
    int(Opcode.DCP_EXPIRATION): "expired",
}


class DocumentRefusedError(Exception):
    """A request about documents is refused; `status` is that of the protocol."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class StoredVersion(msgspec.Struct):
    """One version of a key. Numbers of 64 bits that JSON readers would round are texts."""

    kind: Annotated[str, Meta(extra_json_schema={"enum": ["set", "deleted", "expired", "event"]})]
    seqno: Seqno
    rev: Annotated[str, Meta(description="Its revision, as decimal text.")]
    cas: Cas
    time_s: Annotated[UnixTime, Meta(description="When it was written, by its CAS.")]
    value: Annotated[str | None, Meta(description="null for a deletion.")] = None
    value_encoding: Encoding = "utf-8"
    value_bytes: Count = 0
    is_cut: Annotated[
        bool, Meta(description=f"The value is longer than {VALUE_BYTES_SHOWN} bytes.")
    ] = False
    flags: Count = 0
    expiry: Annotated[Count, Meta(description="Unix seconds; 0: never.")] = 0
    is_json: bool = False
    xattrs: Annotated[dict[str, str], Meta(description="Name -> value, as JSON text.")] = {}


class History(msgspec.Struct):
    """The versions of a key, newest first."""

    vb: VbId
    collection: str
    key: str
    key_encoding: Encoding
    is_there: Annotated[
        bool, Meta(description="The newest version is a document that has not expired.")
    ]
    versions: list[StoredVersion]
    older_than: Annotated[
        Seqno | None,
        Meta(
            description="What to ask with for more; null: there are no more. With many versions"
            " above the seqno asked with, it may be above that seqno, and `versions` may be empty."
        ),
    ]
    end: Annotated[
        str,
        Meta(
            description='Why there are no older versions; "" if there are, or if the first one is'
            " shown."
        ),
    ]
    may_write: Annotated[bool, Meta(description="This user may change the key.")]


class KeyRow(msgspec.Struct):
    """A document that a scan has found."""

    vb: VbId
    key: str
    key_encoding: Encoding
    seqno: Seqno
    time_s: Annotated[UnixTime, Meta(description="When it was written, by its CAS.")]


class ValueRow(msgspec.Struct, kw_only=True):
    """A document, with the beginning of its value."""

    vb: VbId
    key: str
    key_encoding: Encoding
    seqno: Seqno
    time_s: Annotated[UnixTime, Meta(description="When it was written, by its CAS.")]
    value: Annotated[
        str | None,
        Meta(description=f"Its first {PREVIEW_BYTES} bytes; null: a deletion."),
    ] = None
    value_encoding: Encoding = "utf-8"
    value_bytes: Count = 0
    is_json: bool = False


class DocumentPage(msgspec.Struct):
    """Documents of all partitions, sorted by key."""

    documents: list[ValueRow]
    next: Annotated[
        str | None, Meta(description="The `position` to go on from; null: this was all.")
    ]
    unreadable: Annotated[
        list[VbId],
        Meta(description="Partitions whose stored data is damaged; their keys are missing here."),
    ]
    too_new: Annotated[
        list[VbId],
        Meta(
            description="Partitions whose history does not reach back to `at`; their keys are"
            " missing here."
        ),
    ] = []
    kept_since_s: Annotated[
        float | None,
        Meta(description="The first moment as of which those can be read; null: not known."),
    ] = None


class KeyList(msgspec.Struct):
    """What a scan has found."""

    keys: list[KeyRow]
    next: Annotated[
        str | None, Meta(description="The `position` to go on from; null: this was all.")
    ]
    searched: Annotated[Count, Meta(description="Partitions that are done.")]
    unreadable: Annotated[
        list[VbId],
        Meta(description="Partitions whose stored data is damaged; their keys are missing here."),
    ]


class Changed(msgspec.Struct):
    """A change that is committed."""

    vb: VbId
    seqno: Seqno
    cas: Cas


class Documents:
    """See the module."""

    def __init__(
        self,
        engine: Engine,
        views: Views,
        commits: CommitWaiters,
        merging: Merging,
        sessions: Sessions,
    ) -> None:
        self._engine = engine
        self._views = views
        self._commits = commits
        self._merging = merging
        self._sessions = sessions
        self._scans = 0

    def stored_key(self, key: bytes, collection: str) -> tuple[int, bytes]:
        """Return partition and stored key. Raises DocumentRefusedError."""
        if not 0 < len(key) <= KEY_BYTES_MAX:
            raise DocumentRefusedError(
                Status.EINVAL, f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}"
            )
        return vbucket_of(key, self._engine.num_vbuckets), self._prefix_of(collection) + key

    def _prefix_of(self, collection: str) -> bytes:
        collection_id = self._engine.keyspace.manifest.collection_id(collection)
        if collection_id is None:
            raise DocumentRefusedError(
                Status.UNKNOWN_COLLECTION, f"there is no collection {collection[:100]!r}"
            )
        return encode_leb128(collection_id)

    def _path(self, stored_key: bytes) -> str:
        return self._engine.keyspace.manifest.path_of(collection_of(stored_key))

    async def until_committed(self, vb_id: int) -> None:
        """Return once all changes made to a partition are committed. Raises DocumentRefusedError if
        that takes too long.
        """
        try:
            async with asyncio.timeout(COMMIT_WAIT_S):
                await self._commits.until_partition(vb_id)
        except TimeoutError as error:
            why = self._engine.write_refusal or "the log or a replica is slow"
            raise DocumentRefusedError(
                Status.ETMPFAIL, f"partition {vb_id} has changes that are not committed yet: {why}"
            ) from error

    # -- reading ---------------------------------------------------------------------------------

    async def history(
        self, key: bytes, collection: str, rights: Rights, *, older_than: int, versions_max: int
    ) -> History:
        """Return the newest versions of a key that are kept, or those below a seqno (0: all).

        Raises DocumentRefusedError, StoreDamagedError.
        """
        vb_id, stored_key = self.stored_key(key, collection)
        path = self._path(stored_key)
        _check(rights, Opcode.GET, path, key)
        part = self._engine.partitions[vb_id]
        entry: bytes | None
        entry = self._engine.versions.newest_entry(part, stored_key)
        is_there = entry is not None and entry[OPCODE_AT] == Opcode.DCP_MUTATION
        if is_there and entry is not None and 0 < expiry_of(entry) <= int(time.time()):
            is_there = False
        start = self._start_of(part, stored_key, entry, older_than)
        found, next_seqno, end = await self._walk(
            part, stored_key, start, older_than, versions_max, rights
        )
        await self.until_committed(vb_id)
        text, encoding = text_of(key)
        may_write = all(
            rights.denial(opcode, path, key) is None for opcode in (Opcode.SET, Opcode.DELETE)
        )
        return History(
            vb_id, path, text, encoding, is_there, found, next_seqno, end, may_write
        )  # fmt: skip

    async def _walk(
        self,
        part: Partition,
        stored_key: bytes,
        entry: bytes | None,
        older_than: int,
        versions_max: int,
        rights: Rights,
    ) -> tuple[list[StoredVersion], int | None, str]:
        """Return versions from `entry` on, newest first, what to ask with for more, and why there
        are no more.
        """
        found: list[StoredVersion] = []
        left_bytes, looked_at, vb_uuid = HISTORY_BYTES, 0, part.vb_uuid
        while entry is not None:
            seqno = seqno_of(entry)
            if not older_than or seqno < older_than:
                if len(found) >= versions_max or left_bytes <= 0:
                    return found, found[-1].seqno, ""
                version = version_of(entry, shows_system=rights.may_read_system_xattrs)
                found.append(version)
                left_bytes -= _shown_bytes(version)
            prev_seqno = prev_seqno_of(entry)
            if not prev_seqno:
                return found, None, ""
            looked_at += 1
            if looked_at >= HISTORY_WORK:
                return found, seqno, ""
            if looked_at % SCAN_STEP_WORK == 0:
                await asyncio.sleep(0)
                if part.vb_uuid != vb_uuid:
                    raise DocumentRefusedError(
                        Status.EBUSY,
                        f"partition {part.vb_id} got a new version of its history meanwhile",
                    )
            entry = self._engine.versions.entry_at(part, prev_seqno)
            if entry is None or key_of(entry) != stored_key:
                return found, None, "older versions are no longer kept (setting history_window)"
        return found, None, "this key has no version that is kept"

    def _start_of(
        self, part: Partition, stored_key: bytes, newest: bytes | None, older_than: int
    ) -> bytes | None:
        """Return the version to begin a history with: that with the seqno `older_than`, or the
        newest one if there is no such version of the key.
        """
        if newest is not None and 0 < older_than < seqno_of(newest):
            entry = self._engine.versions.entry_at(part, older_than)
            if entry is not None and key_of(entry) == stored_key:
                return entry
        return newest

    async def keys(
        self, prefix: bytes, collection: str, rights: Rights, *, position: str, limit: int
    ) -> KeyList:
        """Return the next keys with a prefix, by partition, and by key within a partition.

        `position` is `next` of the answer before, "" for the beginning. Keys that the user may not
        read are left out. A damaged partition does not hide the others. Raises
        DocumentRefusedError.
        """
        num_vbuckets = self._engine.num_vbuckets
        start_vb, after = _position_of(position, num_vbuckets)
        stored_prefix = self._prefix_of(collection) + prefix
        path = self._path(stored_prefix)
        if self._scans >= SCANS_MAX:
            raise DocumentRefusedError(
                Status.EBUSY, f"{SCANS_MAX} searches run already; try again in a moment"
            )
        self._scans += 1
        deadline_s = time.monotonic() + SCAN_TIME_S
        rows: list[KeyRow] = []
        unreadable: list[int] = []
        try:
            for vb_id in range(start_vb, num_vbuckets):
                last = None
                try:
                    last = await self._scan(
                        vb_id, stored_prefix, after, path, rights, rows, limit, deadline_s
                    )
                except StoreDamagedError:
                    unreadable.append(vb_id)
                if last is not None:
                    return KeyList(rows, f"{vb_id}.{last.hex()}", vb_id, unreadable)
                after = b""
                if time.monotonic() > deadline_s and vb_id + 1 < num_vbuckets:
                    return KeyList(rows, f"{vb_id + 1}.", vb_id + 1, unreadable)
            return KeyList(rows, None, num_vbuckets, unreadable)
        finally:
            self._scans -= 1

    async def _scan(
        self,
        vb_id: int,
        prefix: bytes,
        after: bytes,
        path: str,
        rights: Rights,
        rows: list[KeyRow],
        limit: int,
        deadline_s: float,
    ) -> bytes | None:
        """Add the keys of one partition. If the request must end before the partition does, return
        the last key that was added.

        It ends at such a key only, because the client is told the key. Keys that are not shown may
        be keys that this user may not read.
        """
        view = self._views.open(vb_id, self._engine.partitions[vb_id].committed_seqno, _OWNER)
        last, now_s = after, int(time.time())
        # No key is longer, so this is the last key with the prefix.
        end = prefix + b"\xff" * (KEY_BYTES_MAX + 1)
        scan = view.scan(max(prefix, after), end, with_values=False)
        work = 0
        """Since this task last let others run."""
        try:
            while not scan.is_done:
                if work >= SCAN_STEP_WORK:
                    work = 0
                    await asyncio.sleep(0)
                    if time.monotonic() > deadline_s and last != after:
                        return last
                found = scan.step(1, SCAN_STEP_WORK - work)
                work += scan.last_work
                for shown in found:
                    if shown.key == after:
                        continue
                    row = self._row(vb_id, shown, path, rights, now_s)
                    if row is None:
                        continue
                    last = shown.key
                    rows.append(row)
                    if len(rows) >= limit:
                        return last
        except ViewInvalidError as error:
            raise DocumentRefusedError(Status.EBUSY, str(error)) from error
        finally:
            self._views.close(view)
        await asyncio.sleep(0)
        return None

    async def sorted_documents(
        self,
        prefix: bytes,
        collection: str,
        rights: Rights,
        *,
        position: str,
        limit: int,
        at_s: float | None = None,
    ) -> DocumentPage:
        """Return the next documents with a prefix, sorted by key over all partitions: those of now,
        or those that were there at a moment (Unix time), as far as the history reaches back.

        `position` is `next` of the answer before, "" for the beginning. Keys that the user may not
        read are left out. Raises DocumentRefusedError.
        """
        stored_prefix = self._prefix_of(collection) + prefix
        path = self._path(stored_prefix)
        start = max(stored_prefix, _key_after(position))
        if self._scans >= SCANS_MAX:
            raise DocumentRefusedError(
                Status.EBUSY, f"{SCANS_MAX} searches run already; try again in a moment"
            )
        self._scans += 1
        first = _FirstRows(limit + 1, stored_prefix + b"\xff" * (KEY_BYTES_MAX + 1))
        unreadable: list[int] = []
        too_new: dict[int, float | None] = {}
        try:
            async with asyncio.timeout(PAGE_TIME_S):
                for vb_id in range(self._engine.num_vbuckets):
                    try:
                        await self._first_of(vb_id, start, path, rights, first, at_s)
                    except StoreDamagedError:
                        unreadable.append(vb_id)
                    except NotKeptError as error:
                        too_new[vb_id] = error.since_s
        except TimeoutError as error:
            raise DocumentRefusedError(
                Status.EBUSY,
                f"the search took longer than {PAGE_TIME_S:.0f} s; ask for a longer prefix",
            ) from error
        finally:
            self._scans -= 1
        rows = first.rows[:limit]
        has_more = len(first.rows) > limit
        return DocumentPage(
            [row for _, row in rows], rows[-1][0].hex() if has_more else None, unreadable,
            list(too_new), max((each for each in too_new.values() if each), default=None),
        )  # fmt: skip

    async def _first_of(
        self,
        vb_id: int,
        start: bytes,
        path: str,
        rights: Rights,
        first: _FirstRows,
        at_s: float | None,
    ) -> None:
        """Add the documents of one partition that are among the first ones. Raises NotKeptError."""
        part = self._engine.partitions[vb_id]
        if not (part.item_count if at_s is None else part.committed_seqno):
            return
        seqno, now_s = part.committed_seqno, int(time.time())
        if at_s is not None:
            seqno, now_s = seqno_at(self._engine.versions, part, at_s), int(at_s)
        view = self._views.open(vb_id, seqno, _OWNER)
        scan = view.scan(start, first.end)
        try:
            while not scan.is_done:
                for shown in scan.step(first.wanted, SCAN_STEP_WORK):
                    if shown.key > first.end:
                        return
                    found = self._readable(shown, path, rights, now_s)
                    if found is None:
                        continue
                    row = ValueRow(**key_row(vb_id, found, shown.meta.seqno, shown.meta.cas))
                    value_row(row, shown.meta.datatype, shown.value)
                    first.add(shown.key, row)
                await asyncio.sleep(0)
        except ViewInvalidError as error:
            raise DocumentRefusedError(Status.EBUSY, str(error)) from error
        finally:
            self._views.close(view)

    def _row(
        self, vb_id: int, shown: Shown, path: str, rights: Rights, now_s: int
    ) -> KeyRow | None:
        key = self._readable(shown, path, rights, now_s)
        if key is None:
            return None
        text, encoding = text_of(key)
        return KeyRow(vb_id, text, encoding, shown.meta.seqno, time_of(shown.meta.cas))

    def _readable(self, shown: Shown, path: str, rights: Rights, now_s: int) -> bytes | None:
        """Return the key of a document that is there for this user, None if it is not."""
        if 0 < shown.meta.expiry <= now_s or not self._engine.keyspace.is_reachable(shown.key):
            return None
        decoded = decode_leb128(shown.key)
        assert decoded is not None, "stored keys begin with a collection's id"
        key = shown.key[decoded[1] :]
        return None if rights.denial(Opcode.GET, path, key) is not None else key

    # -- changes -----------------------------------------------------------------------------------

    async def put(
        self,
        user: str,
        rights: Rights,
        key: bytes,
        collection: str,
        value: bytes,
        *,
        cas: int,
        flags: int,
        expiry: int,
        only_new: bool,
    ) -> Changed:
        """Store a document; a `cas` other than 0 must be the document's own. `expiry` is as in the
        protocol: up to 30 days it counts from now. `only_new`: refuse if there is a document.

        Raises DocumentRefusedError.
        """
        vb_id, stored_key = self.stored_key(key, collection)
        packet = pack_request(
            Opcode.ADD if only_new else Opcode.SET,
            vb_id=vb_id, cas=cas, key=stored_key, value=value,
            extras=_STORE_EXTRAS.pack(flags, expiry),
        )  # fmt: skip
        return await self._change(user, rights, vb_id, packet)

    async def remove(
        self, user: str, rights: Rights, key: bytes, collection: str, *, cas: int
    ) -> Changed:
        """Delete a document. Raises DocumentRefusedError."""
        vb_id, stored_key = self.stored_key(key, collection)
        packet = pack_request(Opcode.DELETE, vb_id=vb_id, cas=cas, key=stored_key)
        return await self._change(user, rights, vb_id, packet)

    async def _change(self, user: str, rights: Rights, vb_id: int, packet: bytes) -> Changed:
        state = self._sessions.new_console_state()
        state.shared = state.shared._replace(faults=FaultTable())
        state.login.logged_in(user, rights)
        session = Session(state)
        features = b"".join(feature.to_bytes(2, "big") for feature in _FEATURES)
        session.receive(
            pack_request(Opcode.HELLO, key=b"web console", value=features) + packet, time.time_ns()
        )
        give_up_s = time.monotonic() + ROOM_LIMIT_S
        while state.pause.is_for_room:  # as long as write_wait allows; then the session refuses
            if time.monotonic() > give_up_s:
                raise DocumentRefusedError(Status.ETMPFAIL, "the store has fallen behind")
            await self._merging.wait(ROOM_WAIT_S)
            if not self._engine.writers_wait or self._engine.write_refusal:
                session.resume(time.time_ns())
        self._commits.kick()
        self._sessions.note_console(state)
        answer = _answer_in(state)
        if answer.status:
            # Most refusals tell what is stored, perhaps uncommitted. This one tells nothing of it.
            if answer.status != Status.ETMPFAIL:
                await self.until_committed(vb_id)
            raise DocumentRefusedError(answer.status, _why(answer))
        await self._commits.until_partition(vb_id)
        seqno = int.from_bytes(answer.extras[8:16], "big")
        return Changed(vb_id, seqno, str(answer.cas))


# -- pure ------------------------------------------------------------------------------------------


class _FirstRows:
    """The first rows by key of those that are added."""

    def __init__(self, wanted: int, end: bytes) -> None:
        self.wanted = wanted
        self.end = end
        """No key above it is among them."""
        self.rows: list[tuple[bytes, ValueRow]] = []
        """Sorted by their stored keys."""

    def add(self, key: bytes, row: ValueRow) -> None:
        """Add a row, if it is among the first ones."""
        insort(self.rows, (key, row), key=itemgetter(0))
        if len(self.rows) > self.wanted:
            self.rows.pop()
        if len(self.rows) == self.wanted:
            self.end = self.rows[-1][0]


def key_row(vb_id: int, key: bytes, seqno: int, cas: int) -> dict[str, Any]:
    """Return the members of a `ValueRow` that are not about its value."""
    text, encoding = text_of(key)
    return {
        "vb": vb_id, "key": text, "key_encoding": encoding, "seqno": seqno, "time_s": time_of(cas),
    }  # fmt: skip


def value_row(row: ValueRow, datatype: int, value: bytes) -> None:
    """Add a stored value to a row. Raises StoreDamagedError."""
    body_datatype, body = plain_body(datatype, value)
    row.value_bytes, row.is_json = len(body), bool(body_datatype & 1)
    row.value, row.value_encoding = _cut_text(body, PREVIEW_BYTES)


def _key_after(position: str) -> bytes:
    """Return the first key behind that of a position of sorted documents."""
    try:
        return bytes.fromhex(position) + b"\0" if position else b""
    except ValueError as error:
        raise DocumentRefusedError(
            Status.EINVAL, f"{position[:50]!r} is no position of a search"
        ) from error


def _check(rights: Rights, opcode: Opcode, path: str, key: bytes) -> None:
    denial = rights.denial(opcode, path, key)
    if denial is not None:
        raise DocumentRefusedError(Status.EACCESS, denial.why)


def _answer_in(state: SessionState) -> Frame:
    """Return the answer to the last request of a session."""
    frames = FrameDecoder().feed(b"".join(state.answers))
    assert len(frames) == 2, "HELLO and one change"
    return frames[1]


def _why(answer: Frame) -> str:
    """Return the text of an error answer."""
    try:
        return str(msgspec.json.decode(answer.value)["error"]["context"])
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return ""


def _position_of(position: str, num_vbuckets: int) -> tuple[int, bytes]:
    if not position:
        return 0, b""
    vb, _, after = position.partition(".")
    try:
        vb_id, key = int(vb), bytes.fromhex(after)
    except ValueError:
        vb_id, key = -1, b""
    if not 0 <= vb_id < num_vbuckets:
        raise DocumentRefusedError(Status.EINVAL, f"{position[:50]!r} is no position of a search")
    return vb_id, key


def text_of(raw: bytes) -> tuple[str, str]:
    """Return bytes as text, and how it is encoded."""
    try:
        return raw.decode(), "utf-8"
    except UnicodeDecodeError:
        return b64encode(raw).decode(), "base64"


def time_of(cas: int) -> float:
    """Return the time of a CAS, Unix seconds."""
    return round(cas / 1e9, 3)


def version_of(entry: bytes, *, shows_system: bool) -> StoredVersion:
    """Return a stored change as a version. System XATTRs are shown to some users only.

    Raises StoreDamagedError.
    """
    opcode, _, datatype, _, cas, seqno, rev_seqno = META.unpack_from(entry)
    version = StoredVersion(
        KINDS.get(opcode, "event"), seqno, str(rev_seqno), str(cas), time_of(cas)
    )
    if opcode == Opcode.DCP_MUTATION:
        (version.flags,) = _FLAGS_AT.unpack_from(entry)
        version.expiry = expiry_of(entry)
        body_datatype, body = plain_body(datatype, value_of(entry))
        version.value_bytes = len(body)
        version.is_cut = len(body) > VALUE_BYTES_SHOWN
        version.is_json = bool(body_datatype & 1)
        version.value, version.value_encoding = _cut_text(body)
    plain_datatype, whole = plain(datatype, value_of(entry))
    version.xattrs = {
        name.decode(): text.decode()
        for name, text in unpack_xattrs(section_of(whole, plain_datatype)).items()
        if shows_system or not is_system(name)
    }
    return version


def _shown_bytes(version: StoredVersion) -> int:
    """Return how much a version adds to an answer, about."""
    xattrs = sum(len(name) + len(text) for name, text in version.xattrs.items())
    return min(version.value_bytes, VALUE_BYTES_SHOWN) + xattrs


def _cut_text(body: bytes, bytes_max: int = VALUE_BYTES_SHOWN) -> tuple[str, str]:
    """Return a value, or its beginning, as text."""
    if len(body) <= bytes_max:
        return text_of(body)
    piece = body[:bytes_max]
    for left_out in range(4):  # a character of UTF-8 may be cut in the middle
        text, encoding = text_of(piece[: len(piece) - left_out])
        if encoding == "utf-8":
            return text, encoding
    return text_of(piece)
