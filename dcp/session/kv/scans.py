"""Commands of range scans: make a scan, take its next documents, cancel it.

Rules: kv_engine's (docs/range_scans there). A scan is requested as JSON with keys in base64. The
answer to CONTINUE says whether there is more (RANGE_SCAN_MORE) or not (RANGE_SCAN_COMPLETE).

Ours: each CONTINUE gets one packet after a bounded amount of work, possibly MORE without a
document. Its time limit is ignored, because the work takes less. A scan shows the newest state, and
the answer to CREATE waits until that is committed. A required seqno above it is refused, not waited
for.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final

import msgspec

from dcp.session.kv.documents import DATATYPE_JSON
from dcp.session.kv.range_scans import BATCH_DOCUMENTS, RangeScan, Sample
from dcp.session.state import SessionState
from dcp.wire.frame import MAX_KEY_BYTES, Frame
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, UnknownNameError, WrongVbucketError
from vbucket.engine.partition import Partition, VbState
from vbucket.engine.read_view import STEP_BYTES, Shown, TooManyViewsError, ViewInvalidError
from vbucket.model.manifest import DEFAULT_COLLECTION, decode_leb128, encode_leb128
from vbucket.store.environment import StoreDamagedError
from vbucket.store.plain_value import plain_body

Handler = Callable[[Frame], None]

CONTINUE_EXTRAS: Final = Struct(">16sIII")
"""Id of the scan, most documents, most milliseconds, most bytes; 0 is no limit."""
SCAN_ID_BYTES: Final = 16
BOUND_BYTES_MAX: Final = MAX_KEY_BYTES + 8
"""Bounds may be longer than keys: SDKs end the range of a prefix with four more bytes."""
DOCUMENT_META: Final = Struct(">IIQQB")
"""Flags, expiry, seqno, CAS, datatype."""
KEYS_FLAG: Final = bytes(4)
DOCUMENTS_FLAG: Final = bytes((0, 0, 0, 1))


class _Range(msgspec.Struct):
    start: bytes | msgspec.UnsetType = msgspec.UNSET
    excl_start: bytes | msgspec.UnsetType = msgspec.UNSET
    end: bytes | msgspec.UnsetType = msgspec.UNSET
    excl_end: bytes | msgspec.UnsetType = msgspec.UNSET


class _Sampling(msgspec.Struct):
    samples: int
    seed: int = 0


class _Requirements(msgspec.Struct):
    vb_uuid: str
    seqno: int
    seqno_exists: bool = False
    timeout_ms: int = 0


class _Create(msgspec.Struct):
    collection: str = "0"
    key_only: bool = False
    range: _Range | msgspec.UnsetType = msgspec.UNSET
    sampling: _Sampling | msgspec.UnsetType = msgspec.UNSET
    snapshot_requirements: _Requirements | msgspec.UnsetType = msgspec.UNSET


_decode: Final = msgspec.json.Decoder(_Create).decode


class ScanCommands:
    """Handlers of these commands for one session."""

    def __init__(self, state: SessionState) -> None:
        self._state = state

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler; nothing if the session has no range scans."""
        if self._state.shared.scans is None:
            return {}
        return {
            Opcode.RANGE_SCAN_CREATE: self.create,
            Opcode.RANGE_SCAN_CONTINUE: self.go_on,
            Opcode.RANGE_SCAN_CANCEL: self.cancel,
        }

    # -- create ----------------------------------------------------------------------------------

    def create(self, request: Frame) -> None:
        """Make a scan; answer its id, 16 bytes."""
        state = self._state
        part = self._active_partition(request)
        asked = self._asked(request)
        collection_id = self._collection_of(asked.collection)
        self._check_requirements(part, asked.snapshot_requirements)
        scan_id = self._made(part, asked, collection_id)
        state.observes(part.vb_id)
        if scan_id is None:  # an everyday answer, and no refusal
            state.answer(request, Status.KEY_ENOENT)
        else:
            state.answer(request, value=scan_id)

    def _asked(self, request: Frame) -> _Create:
        if request.extras or request.key:
            raise RefusedError(
                Status.EINVAL, "a range scan request takes a JSON object and nothing else"
            )
        if not request.datatype & self._state.hello.has_json & DATATYPE_JSON:
            why = "negotiate JSON (HELLO 0x0b), and send the request with datatype 0x01"
            raise RefusedError(Status.EINVAL, why)
        try:
            asked = _decode(request.value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RefusedError(Status.EINVAL, f"not a valid range scan: {error}") from error
        if (asked.range is msgspec.UNSET) == (asked.sampling is msgspec.UNSET):
            raise RefusedError(Status.EINVAL, 'a range scan has either "range" or "sampling"')
        return asked

    def _collection_of(self, text: str) -> int:
        """Return the id of a collection that exists. Raises RefusedError."""
        try:
            collection_id = int(text, 16)
        except ValueError as error:
            why = f'"collection" is a hexadecimal id, not {text[:20]!r}'
            raise RefusedError(Status.EINVAL, why) from error
        self._check_collection(collection_id)
        return collection_id

    def _check_collection(self, collection_id: int) -> None:
        if collection_id not in self._state.engine.keyspace.manifest.collections:
            raise UnknownNameError(Status.UNKNOWN_COLLECTION)

    def _check_requirements(
        self, part: Partition, required: _Requirements | msgspec.UnsetType
    ) -> None:
        if isinstance(required, msgspec.UnsetType):
            return
        if required.vb_uuid != str(part.vb_uuid):
            raise RefusedError(
                Status.RANGE_SCAN_VB_UUID_NOT_EQUAL,
                f"partition {part.vb_id} has the version {part.vb_uuid} now",
            )
        if required.seqno > part.high_seqno:
            raise RefusedError(
                Status.ETMPFAIL,
                f"partition {part.vb_id} ends at seqno {part.high_seqno}, below {required.seqno}",
            )
        assert self._state.shared.scans is not None
        if required.seqno_exists and not self._state.shared.scans.views.has_version(
            part.vb_id, required.seqno
        ):
            raise RefusedError(Status.NOT_STORED, f"no version has the seqno {required.seqno}")

    def _made(self, part: Partition, asked: _Create, collection_id: int) -> bytes | None:
        """Return the id of a new scan; None: there is no document to scan."""
        state = self._state
        scans = state.shared.scans
        assert scans is not None
        prefix = encode_leb128(collection_id)
        sample = None
        if isinstance(asked.range, msgspec.UnsetType):
            assert not isinstance(asked.sampling, msgspec.UnsetType)
            start, end, excluded = prefix, prefix + b"\xff" * MAX_KEY_BYTES, b""
            sample = _sample_of(part, asked.sampling, collection_id)
        else:
            start, end, excluded = _bounds_of(prefix, asked.range)
        self._check_rights(collection_id, start[len(prefix) :], end[len(prefix) :])
        try:
            view = scans.views.open(part.vb_id, owner=state.login.user)
        except TooManyViewsError as error:
            raise RefusedError(Status.ETMPFAIL, str(error)) from error
        made = RangeScan(
            view.scan(start, end, with_values=not asked.key_only),
            state,
            state.login.user,
            collection_id,
            is_key_only=asked.key_only,
            now_s=self._state.engine.now_s,
            excluded=excluded,
            sample=sample,
        )
        scan_id = scans.add(made)
        has_any = False
        try:
            has_any = made.look_ahead()
        finally:
            if not has_any:
                scans.end(scan_id)
        return scan_id if has_any else None

    def _check_rights(self, collection_id: int, start: bytes, end: bytes) -> None:
        """Raise RefusedError if the user may not read every key of the range."""
        state = self._state
        assert state.login.rights is not None, "asked before the login"
        if state.login.rights.is_full:
            return
        shared = 0
        while shared < min(len(start), len(end)) and start[shared] == end[shared]:
            shared += 1
        path = state.engine.keyspace.manifest.path_of(collection_id)
        denial = state.login.rights.denial(Opcode.GET, path, start[:shared])
        if denial is not None:
            raise RefusedError(
                Status.EACCESS, f"user {state.login.user!r} may not scan this: {denial.why}"
            )

    # -- continue and cancel -----------------------------------------------------------------------

    def go_on(self, request: Frame) -> None:
        """Answer the next documents of a scan."""
        state = self._state
        if len(request.extras) != CONTINUE_EXTRAS.size or request.key or request.value:
            raise RefusedError(Status.EINVAL, "RANGE_SCAN_CONTINUE takes 28 bytes of extras")
        scan_id, documents_max, _, bytes_max = CONTINUE_EXTRAS.unpack(request.extras)
        self._check_fence(request)
        scan = self._find(request, scan_id)
        scans = state.shared.scans
        assert scans is not None
        scan.owner = state
        try:
            self._active_partition(request)
            self._check_collection(scan.collection_id)
            documents = scan.batch(
                min(documents_max or BATCH_DOCUMENTS, BATCH_DOCUMENTS),
                min(bytes_max or STEP_BYTES, STEP_BYTES),
            )
        except ViewInvalidError as error:
            scans.end(scan_id)
            raise RefusedError(Status.RANGE_SCAN_CANCELLED, str(error)) from error
        except (RefusedError, StoreDamagedError):
            scans.end(scan_id)
            raise
        is_done = scan.is_done
        if is_done:
            scans.end(scan_id)
        pack = _packed_key if scan.is_key_only else _packed_document
        state.answer(
            request,
            Status.RANGE_SCAN_COMPLETE if is_done else Status.RANGE_SCAN_MORE,
            extras=KEYS_FLAG if scan.is_key_only else DOCUMENTS_FLAG,
            value=b"".join(map(pack, documents)),
        )

    def cancel(self, request: Frame) -> None:
        """Cancel a scan."""
        state = self._state
        if len(request.extras) != SCAN_ID_BYTES or request.key or request.value:
            raise RefusedError(Status.EINVAL, "RANGE_SCAN_CANCEL takes 16 bytes of extras")
        self._find(request, request.extras)
        assert state.shared.scans is not None
        state.shared.scans.end(request.extras)
        state.answer(request)

    def _find(self, request: Frame, scan_id: bytes) -> RangeScan:
        """Return the client's own scan. Raises RefusedError."""
        state = self._state
        assert state.shared.scans is not None
        scan = state.shared.scans.find(scan_id, request.vb_id, state.login.user)
        if scan is None:
            why = "there is no such scan: it is done, given up, or its connection closed"
            raise RefusedError(Status.KEY_ENOENT, why)
        return scan

    def _active_partition(self, request: Frame) -> Partition:
        """Return the partition of a request. Raises RefusedError if it is not active here."""
        engine = self._state.engine
        if request.vb_id < engine.num_vbuckets:
            part = engine.partitions[request.vb_id]
            if part.state == VbState.ACTIVE:
                return part
            raise self._state.elsewhere(part)
        raise WrongVbucketError

    def _check_fence(self, request: Frame) -> None:
        """Raise RefusedError if the partition may not answer now. The scan stays open."""
        engine = self._state.engine
        if request.vb_id < engine.num_vbuckets:
            part = engine.partitions[request.vb_id]
            if part.state == VbState.FENCED:
                raise self._state.elsewhere(part)


def _bounds_of(prefix: bytes, asked: _Range) -> tuple[bytes, bytes, bytes]:
    """Return the first and last stored key, both included, and a key to leave out (b"": none)."""
    start = _one_of(asked.start, asked.excl_start, "start")
    end = _one_of(asked.end, asked.excl_end, "end")
    if start > end:
        raise RefusedError(Status.EINVAL, "the range ends before it starts")
    excluded = b"" if asked.excl_end is msgspec.UNSET else prefix + end
    start = prefix + start
    # The first key after another is that key and a zero byte.
    return start if asked.excl_start is msgspec.UNSET else start + b"\0", prefix + end, excluded


def _one_of(
    included: bytes | msgspec.UnsetType, excluded: bytes | msgspec.UnsetType, name: str
) -> bytes:
    given = [bound for bound in (included, excluded) if not isinstance(bound, msgspec.UnsetType)]
    if len(given) != 1:
        raise RefusedError(Status.EINVAL, f'a range has one of "{name}" and "excl_{name}"')
    if len(given[0]) > BOUND_BYTES_MAX:
        why = f'"{name}" has {len(given[0])} bytes; at most {BOUND_BYTES_MAX} make sense'
        raise RefusedError(Status.EINVAL, why)
    return given[0]


def _sample_of(part: Partition, asked: _Sampling, collection_id: int) -> Sample:
    if asked.samples < 1:
        raise RefusedError(Status.EINVAL, '"samples" is 1 or more')
    if collection_id == DEFAULT_COLLECTION:
        documents = part.item_count - part.tally.documents
    else:
        documents = part.tally.collections.get(collection_id, (0, 0))[1]
    return Sample(asked.samples, documents, asked.seed)


def _packed_key(shown: Shown) -> bytes:
    key = _logical(shown.key)
    return encode_leb128(len(key)) + key


def _packed_document(shown: Shown) -> bytes:
    meta, key = shown.meta, _logical(shown.key)
    datatype, value = plain_body(meta.datatype, shown.value)
    head = DOCUMENT_META.pack(meta.flags, meta.expiry, meta.seqno, meta.cas, datatype)
    return head + encode_leb128(len(key)) + key + encode_leb128(len(value)) + value


def _logical(key: bytes) -> bytes:
    """Return a stored key without its collection's id."""
    decoded = decode_leb128(key)
    assert decoded is not None, "stored keys begin with one"
    return key[decoded[1] :]
