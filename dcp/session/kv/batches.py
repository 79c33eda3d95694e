"""X_BATCH, our extension: changes of several documents that are made together, or not at all.

    key      a document of the batch: its partition is that of the request, and its collection that
             of all
    extras   u32 number of changes
    value    each change: u8 mode (0 SET, 1 ADD, 2 REPLACE, 3 DELETE), u8 0, u16 key length,
             u32 flags, u32 expiry, u64 CAS, u32 value length; key without its collection, value

The answer has the one CAS of all changes, and for each u64 vb_uuid, u64 seqno. A refusal says which
change cannot be made, and nothing was changed. Nodes of clusters refuse the command.

`vbucket.engine.documents.batch` has the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from dcp.session.access.rights import split_key
from dcp.session.kv.documents import DocumentCommands
from dcp.session.kv.values import too_big
from dcp.session.state import SessionState
from dcp.wire.frame import Frame, pack_response
from dcp.wire.message import BATCH_CHANGE, BATCH_CHANGES_MAX, MUTATION_TOKEN, U32
from dcp.wire.opcode import Opcode
from dcp.wire.status import ERROR_TABLE, RefusedError, Status, WrongVbucketError
from vbucket.engine.documents.batch import (
    BatchChange,
    BatchMode,
    BatchRefusedError,
    apply_batch,
)
from vbucket.model.ids import vbucket_of

_OPCODES = (Opcode.SET, Opcode.ADD, Opcode.REPLACE, Opcode.DELETE)
"""By mode: the commands whose rights each change needs."""


class BatchCommand:
    """The handler of this command for one session."""

    def __init__(self, state: SessionState, documents: DocumentCommands) -> None:
        self._state = state
        self._documents = documents

    def apply(self, request: Frame) -> None:
        """Make all changes of a request, or none."""
        state, engine = self._state, self._state.engine
        if state.shared.replication is not None:
            raise RefusedError(
                Status.NOT_SUPPORTED,
                "atomic batches are for a node alone: in a cluster each partition commits by"
                " itself, so a failover could keep a part of a batch. Write the documents one by"
                " one, or put what belongs together into one document",
            )
        if len(request.extras) != U32.size or not request.key:
            raise RefusedError(Status.EINVAL, "a batch has a key, and u32 number of changes")
        count = U32.unpack(request.extras)[0]
        if not 0 < count <= BATCH_CHANGES_MAX:
            raise RefusedError(
                Status.EINVAL, f"a batch has 1 to {BATCH_CHANGES_MAX} changes, not {count}"
            )
        self._documents.locate(request.vb_id, request.key)
        changes = list(islice(self._changes(request), count + 1))
        if len(changes) != count or len({change.key for change in changes}) != count:
            raise RefusedError(
                Status.EINVAL, f"{count} changes of different keys are announced and do not follow"
            )
        try:
            made = apply_batch(engine, changes)
        except BatchRefusedError as error:
            raise self._refusal(changes[error.index], error) from error
        state.wait_group = engine.keyspace.group
        uuids = [engine.partitions[change.vb_id].vb_uuid for change in changes]
        tokens = (
            MUTATION_TOKEN.pack(vb_uuid, seqno)
            for vb_uuid, (_, _, seqno) in zip(uuids, made, strict=True)
        )
        answer = pack_response(
            request.opcode, opaque=request.opaque, cas=made[0][1], value=b"".join(tokens)
        )
        state.send(answer)

    def _changes(self, request: Frame) -> Iterator[BatchChange]:
        """Yield the checked changes. Raises RefusedError."""
        state, value, at = self._state, request.value, 0
        key_bytes = len(split_key(request.key, has_collections=state.hello.has_collections)[1])
        prefix = request.key[: len(request.key) - key_bytes]
        while at + BATCH_CHANGE.size <= len(value):
            mode, _, key_len, flags, expiry, cas, value_len = BATCH_CHANGE.unpack_from(value, at)
            key_at = at + BATCH_CHANGE.size
            at = key_at + key_len + value_len
            if at > len(value) or not key_len or mode > BatchMode.DELETE:
                break
            name = value[key_at : key_at + key_len]
            if why := state.denial(_OPCODES[mode], prefix + name):
                raise RefusedError(Status.EACCESS, why)
            place = vbucket_of(name, state.engine.num_vbuckets)
            vb_id, key = self._documents.locate(place, prefix + name)
            if value_len > state.shared.limits.value_bytes_max:
                raise too_big(state)
            yield BatchChange(
                BatchMode(mode), vb_id, key, value[key_at + key_len : at], flags,
                self._documents.absolute_expiry(key, expiry), cas,
            )  # fmt: skip
        if at != len(value):
            raise RefusedError(Status.EINVAL, "a change of the batch is cut short, or of no mode")

    def _refusal(self, change: BatchChange, error: BatchRefusedError) -> RefusedError:
        """Return the refusal of a batch: which change, and why. It waits until what it tells is
        committed.
        """
        if error.status == Status.NOT_MY_VBUCKET:
            return WrongVbucketError(change.vb_id)
        part = self._state.engine.partitions[change.vb_id]
        why = ERROR_TABLE[Status(error.status)][1]
        if error.status == Status.ETMPFAIL:
            why = next(iter(part.holds.values()), "the partition takes no writes now; try again")
        else:
            self._state.observes(change.vb_id)
        key = change.key[1:] if not change.key[0] else change.key
        return RefusedError(
            error.status,
            f"change {error.index} ({key[:40]!r}): {why}; nothing of the batch was changed",
        )
