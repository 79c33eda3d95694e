"""Rare reads of documents: GET_AND_LOCK and UNLOCK, GET_REPLICA, GET_RANDOM_KEY.

These are not the hot path: a handler gets its request as a `Frame`.

Rules: kv_engine's. A lock lasts 15 seconds unless the client asks for 1 to 30. Whoever does not
have the lock's CAS cannot change the document; reads show LOCKED_CAS. Locks are not changes: they
have no seqno, and are not in streams. If what they observed is not committed in time, the client is
told to try again, so what they did is taken back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from dcp.session.kv.documents import DocumentCommands
from dcp.session.state import SessionState
from dcp.wire.frame import Frame, pack_response
from dcp.wire.message import MUTATION_TOKEN, U32
from dcp.wire.opcode import Opcode
from dcp.wire.status import RefusedError, Status, UnknownNameError
from vbucket.engine.engine import StoredDocument
from vbucket.engine.partition import Partition, VbState
from vbucket.engine.read_view import KeyWalk
from vbucket.model.ids import draw_vb_uuid
from vbucket.model.manifest import DEFAULT_COLLECTION, collection_of
from vbucket.store.plain_value import shown

Handler = Callable[[Frame], None]

LOCK_S: Final = 15
LOCK_MAX_S: Final = 30
"""kv_engine's getl_default_timeout and getl_max_timeout."""
WALK_KEYS: Final = 256
"""Keys that a search for any document looks at in one step. It answers one of them."""
WALK_KEYS_MAX: Final = 16_384
"""Keys that it looks at altogether: some 50 ms. There are more only after many deletions."""


class DocumentReadCommands:
    """Handlers of these commands for one session."""

    def __init__(self, state: SessionState, documents: DocumentCommands) -> None:
        self._state = state
        self._engine = state.engine
        self._documents = documents

    def handlers(self) -> dict[int, Handler]:
        """Return opcode -> handler."""
        return {
            Opcode.GET_AND_LOCK: self.get_and_lock,
            Opcode.UNLOCK: self.unlock,
            Opcode.GET_REPLICA: self.get_replica,
            Opcode.GET_RANDOM_KEY: self.get_random_key,
        }

    # -- locks ---------------------------------------------------------------------------------

    def get_and_lock(self, request: Frame) -> None:
        """Answer a document and lock it; the CAS of the answer opens the lock."""
        if len(request.extras) not in {0, U32.size} or not request.key or request.value:
            raise RefusedError(
                Status.EINVAL, "GET_AND_LOCK takes a key, and 0 or 4 bytes of extras"
            )
        seconds = int.from_bytes(request.extras, "big")
        if not 0 < seconds <= LOCK_MAX_S:
            seconds = LOCK_S
        found = self._found(request)
        if found is None:
            return
        part, key, document, seqno = found
        locks = self._engine.locks
        if locks.of(part, key, seqno) is not None:
            self._refuse(request, part, Status.LOCKED)
            return
        cas = locks.lock(part, key, seqno, seconds * 1_000_000_000)
        if not cas:
            why = f"{len(locks.held)} documents are locked, the limit; try again soon"
            raise RefusedError(Status.ETMPFAIL, why)
        self._undone_by(partial(locks.take_back, part, key, cas))
        self._answer(request, document._replace(cas=cas))

    def unlock(self, request: Frame) -> None:
        """End a lock before its time."""
        if request.extras or not request.key or request.value or not request.cas:
            raise RefusedError(Status.EINVAL, "UNLOCK needs a key and the CAS of the lock")
        found = self._found(request)
        if found is None:
            return
        part, key, _, seqno = found
        lock = self._engine.locks.of(part, key, seqno)
        if lock is None or lock.cas != request.cas:
            self._refuse(request, part, Status.NOT_LOCKED if lock is None else Status.LOCKED)
            return
        self._engine.locks.unlock(part, key)
        self._undone_by(partial(self._engine.locks.put_back, part, key, lock))
        self._state.answer(request)

    def _undone_by(self, undo: Callable[[], None]) -> None:
        """Let this be called if the answer is replaced: then the client may ask again."""
        if self._state.marks is not None:
            self._state.current.undo = undo

    def _refuse(self, request: Frame, part: Partition, status: int) -> None:
        self._documents.refuse_outcome(request.opcode, request.opaque, status, part.vb_id)

    def _found(self, request: Frame) -> tuple[Partition, bytes, StoredDocument, int] | None:
        """Return partition, stored key, document and seqno. None: a refusal is answered."""
        vb_id, key = self._documents.locate(request.vb_id, request.key)
        part = self._engine.partitions[vb_id]
        if part.state != VbState.ACTIVE:
            raise self._state.elsewhere(part)
        self._state.observes(vb_id)
        found = self._engine.get(vb_id, key)
        meta = self._engine.newest_meta(vb_id, key)
        if isinstance(found, int) or meta is None:
            status = found if isinstance(found, int) else Status.KEY_ENOENT
            self._documents.refuse_outcome(request.opcode, request.opaque, status, vb_id)
            return None
        self._state.observes(vb_id)  # again: the document may have expired just now
        return part, key, found, meta.seqno

    # -- other reads ---------------------------------------------------------------------------

    def get_replica(self, request: Frame) -> None:
        """Answer a document of a partition that is a replica here: the newest version that is
        committed as far as this replica knows.

        Extras of 16 bytes are ours: a mutation token that the replica must have reached.
        """
        has_token = len(request.extras) == MUTATION_TOKEN.size
        if (request.extras and not has_token) or not request.key or request.value:
            raise RefusedError(
                Status.EINVAL, "GET_REPLICA takes a key, and as extras a mutation token or nothing"
            )
        vb_id, key = self._documents.locate(request.vb_id, request.key)
        state, part = self._state, self._engine.partitions[vb_id]
        if part.state != VbState.REPLICA:
            raise state.elsewhere(part)
        if part.incomplete_snapshot is not None:
            raise RefusedError(Status.ETMPFAIL, f"partition {vb_id}: this replica is being filled")
        if has_token:
            _check_has(part, *MUTATION_TOKEN.unpack(request.extras))
        found = self._engine.get_from_replica(part, key)
        if found is None:
            self._documents.miss(request.opcode, request.opaque)
            return
        self._answer(request, found)

    def get_random_key(self, request: Frame) -> None:
        """Answer some document of a collection, by default of the default one."""
        if len(request.extras) not in {0, U32.size} or request.key or request.value:
            raise RefusedError(Status.EINVAL, "GET_RANDOM_KEY takes 0 or 4 bytes of extras")
        if request.extras and not self._state.hello.has_collections:
            raise RefusedError(Status.EINVAL, "a collection needs collections (HELLO 0x12)")
        collection_id = int.from_bytes(request.extras, "big")
        engine = self._engine
        self._state.observes_manifest()
        if collection_id not in engine.keyspace.manifest.collections:
            raise UnknownNameError(Status.UNKNOWN_COLLECTION)
        drawn, count = draw_vb_uuid(engine.keyspace.draws), engine.num_vbuckets
        left = WALK_KEYS_MAX
        for step in range(count):
            part = engine.partitions[(drawn + step) % count]
            if part.state != VbState.ACTIVE or not _documents_of(part, collection_id):
                continue
            walk = KeyWalk(engine, part.vb_id, part.high_seqno)
            while left > 0 and (keys := walk.take(WALK_KEYS)):
                left -= len(keys)
                first = drawn // count % len(keys)
                if self._has_answered_one_of(request, part, keys[first:] + keys[:first]):
                    return
        if not left > 0:
            why = f"there is no document among {WALK_KEYS_MAX} keys; try again"
            raise RefusedError(Status.ETMPFAIL, why)
        for part in engine.partitions:
            if part.state == VbState.FENCED:
                raise self._state.elsewhere(part)
        raise RefusedError(Status.KEY_ENOENT, "there is no document")

    def _has_answered_one_of(self, request: Frame, part: Partition, keys: list[bytes]) -> bool:
        """Answer the first key that is a document of the collection, if there is one."""
        collection_id = int.from_bytes(request.extras, "big")
        for key in keys:
            if collection_of(key) == collection_id:
                document = self._engine.get(part.vb_id, key)
                if not isinstance(document, int):
                    self._state.observes(part.vb_id)
                    self._answer(
                        request,
                        document,
                        key if self._state.hello.has_collections else key[1:],
                    )
                    return True
        return False

    def _answer(self, request: Frame, document: StoredDocument, key: bytes = b"") -> None:
        state = self._state
        datatype, value = shown(document.datatype, document.value, state.hello.datatypes)
        state.send(
            pack_response(
                request.opcode, opaque=request.opaque, cas=document.cas, extras=document.flags,
                key=key, value=value, datatype=datatype,
            )
        )  # fmt: skip


def _check_has(part: Partition, vb_uuid: int, seqno: int) -> None:
    """Raise RefusedError where a replica does not know that this change is committed."""
    reached = part.failover.upper_of(vb_uuid, part.committed_seqno)
    if reached is None or reached < seqno:
        raise RefusedError(
            Status.ETMPFAIL,
            f"partition {part.vb_id}: this replica does not know of the change with seqno {seqno}"
            f" of version {vb_uuid}; ask the master",
        )


def _documents_of(part: Partition, collection_id: int) -> int:
    """Return how many documents of a collection a partition has."""
    if collection_id == DEFAULT_COLLECTION:
        return part.item_count - part.tally.documents
    return part.tally.collections.get(collection_id, (0, 0))[1]
