"""What an outcome means for the operation: done, or again, and where. Pure.

Used by `clients.kv.routing` alone.

When a write is repeated
- A refusal (NOT_MY_VBUCKET, or a status whose entry in the error map has a retry attribute) says
  that nothing was changed. The write is sent again.
- If the connection broke before the write was sent, it is sent again.
- If the connection broke, or the time ended, after it was sent, it may have been applied. It is not
  repeated: a counter would count twice, and a SET could undo somebody else's later one. The caller
  gets the error, with `may_have_applied` True.
- SYNC_WRITE_AMBIGUOUS is that answer from the server: applied, but not confirmed in time.
A read is repeated in all these cases.
"""

from __future__ import annotations

from copy import copy
from enum import Enum, auto
from typing import Final

from clients.errors import (
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
from dcp.wire.opcode import Opcode
from dcp.wire.status import ERROR_TABLE

READS: Final = frozenset(
    {
        Opcode.GET,
        Opcode.GET_CLUSTER_CONFIG,
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


def reaction_to(error: DcpdError, opcode: int, *, was_sent: bool) -> Reaction:
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
        return Reaction.LOST if opcode in READS or not was_sent else Reaction.END
    return Reaction.END


def final_error(
    error: DcpdError, opcode: int, *, key: bytes, vb_id: int | None, was_sent: bool, note: str
) -> DcpdError:
    """Return the error that the caller gets for one operation.

    An answer of the server that was not repeated is returned as it is. Other errors may belong to a
    whole batch, so they are copied. The copy says what `note` says (how often it was tried), where,
    and for a write whether it changed anything.
    """
    if isinstance(error, StatusError) and not note:
        return error
    final = copy(error)
    if final.key is None and key:
        final.key = key
    if final.vb_id is None:
        final.vb_id = vb_id
    final.what += note
    if opcode not in READS and not isinstance(error, StatusError) and was_sent:
        final.may_have_applied = True
        final.what += "; the change may have been applied"
    elif opcode not in READS and note:
        final.what += "; nothing was changed"
    final.args = (final.what,)
    return final
