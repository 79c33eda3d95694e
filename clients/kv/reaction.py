"""What an outcome means for the operation: done, or again, and where. Pure.

Used by `clients.kv.routing` alone.

When a write is repeated
- A refusal (NOT_MY_VBUCKET, or a status whose entry in the error map has a retry attribute) says
  that nothing was changed. The write is sent again.
- If the connection broke before the write was sent, it is sent again.
- If it was sent and no answer came, it may have been applied. It is not repeated: a counter would
  count twice, and a SET could undo somebody else's later one. The caller gets AmbiguousWriteError.
- A write with a CAS is the exception. The change gives the document another CAS, so a repetition
  cannot be applied after the first one was. If the repetition succeeds, it was the first. If it is
  refused (CAS mismatch, no such document), nobody knows why, and the caller gets
  AmbiguousWriteError.
- SYNC_WRITE_AMBIGUOUS is that answer from the server: applied, but not confirmed in time.
A read is repeated in all these cases.

An ADD is not safe to repeat: between the two somebody may have deleted the document. Couchbase's
SDKs repeat no write that may have been applied, not even one with a CAS.
"""

from __future__ import annotations

from copy import copy
from enum import Enum, auto
from typing import Final

from clients.errors import (
    AmbiguousWriteError,
    CasMismatchError,
    ConnectError,
    ConnectionLostError,
    DcpdError,
    ExistsError,
    NotFoundError,
    NotMyVbucketError,
    OperationTimeoutError,
    StatusError,
    UnknownCollectionError,
    WrongProtocolError,
)
from clients.operation import Operation
from dcp.wire.opcode import Opcode
from dcp.wire.status import ERROR_TABLE

READS: Final = frozenset(
    {
        Opcode.GET,
        Opcode.GET_REPLICA,
        Opcode.SUBDOC_MULTI_LOOKUP,
        Opcode.GET_CLUSTER_CONFIG,
        Opcode.GET_COLLECTIONS_MANIFEST,
        Opcode.GET_COLLECTION_ID,
        Opcode.GET_ALL_VB_SEQNOS,
        Opcode.GET_FAILOVER_LOG,
        Opcode.STAT,
    }
)
"""Commands that change nothing, so they can be repeated at any time. All others are writes."""

RETRY_ATTRIBUTES: Final = frozenset({"retry-now", "retry-later"})
RETRY_STATUSES: Final = frozenset(
    status for status, (_, _, attributes) in ERROR_TABLE.items() if RETRY_ATTRIBUTES & {*attributes}
)
"""Statuses after which the error map lets a client send the request again. Nothing was changed."""

ANSWERS: Final = (NotFoundError, ExistsError, CasMismatchError)
"""Errors that clients meet in normal work: they cost no more than a result."""


def is_repeatable(operation: Operation) -> bool:
    """Whether an operation may be sent again although it may have been applied."""
    return operation[0] in READS or operation[4] != 0


def is_answer(outcome: object) -> bool:
    """Whether an outcome needs no reaction: a result, or one of the errors that are answers."""
    return outcome is not None and (
        not isinstance(outcome, DcpdError) or isinstance(outcome, ANSWERS)
    )


class Reaction(Enum):
    """What to do after an error."""

    END = auto()
    """Tell the caller."""
    AGAIN = auto()
    """Send it again after a pause, to the same node."""
    MOVED = auto()
    """The node does not serve the partition: send it again where a newer map says."""
    LOST = auto()
    """The connection broke: the node may be gone. Send it again, and ask for a newer map."""
    UNREACHABLE = auto()
    """No connection: as LOST, and the node gets a pause of its own."""


def reaction_to(error: DcpdError, operation: Operation, *, was_sent: bool) -> Reaction:
    """Return what to do after an error. `was_sent`: the node may have received the operation."""
    if isinstance(error, NotMyVbucketError):
        return Reaction.MOVED
    if isinstance(error, UnknownCollectionError) and error.key is not None:
        return Reaction.AGAIN  # The id was refused. The name may have a new id now.
    if isinstance(error, StatusError):
        return Reaction.AGAIN if error.status in RETRY_STATUSES else Reaction.END
    if isinstance(error, WrongProtocolError):
        return Reaction.END  # A port does not change what it speaks.
    if isinstance(error, ConnectError):
        return Reaction.UNREACHABLE
    if isinstance(error, OperationTimeoutError):
        return Reaction.END if was_sent else Reaction.UNREACHABLE
    if isinstance(error, ConnectionLostError):
        is_safe = not was_sent or is_repeatable(operation)
        return Reaction.LOST if is_safe else Reaction.END
    return Reaction.END


def final_error(
    error: DcpdError, opcode: int, *, key: bytes, vb_id: int | None, is_unsure: bool, note: str
) -> DcpdError:
    """Return the error that the caller gets for one operation.

    An answer of the server that was not repeated is returned as it is. Other errors may belong to a
    whole batch, so they are copied. The copy says what `note` says (how often it was tried), where,
    and for a write whether it changed anything. `is_unsure`: an attempt got no answer.
    """
    is_write = opcode not in READS
    if is_write and is_unsure and not isinstance(error, AmbiguousWriteError):
        ambiguous = AmbiguousWriteError(
            f"{error.what}{note}; the change may have been applied",
            status=error.status, key=error.key or key or None,
            vb_id=vb_id if error.vb_id is None else error.vb_id, node=error.node,
        )  # fmt: skip
        ambiguous.cause = error
        return ambiguous
    if isinstance(error, StatusError) and not note:
        return error
    final = copy(error)
    if final.key is None and key:
        final.key = key
    if final.vb_id is None:
        final.vb_id = vb_id
    final.what += note
    if is_write and note and not final.may_have_applied:
        final.what += "; nothing was changed"
    final.args = (final.what,)
    return final
