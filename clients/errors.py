"""The errors of the clients, as one tree.

    DcpdError                   .status .vb_id .key .node .retry .hint
    ├── ConnectError            cannot connect
    │   └── WrongProtocolError  the port answers, but it is not a key-value port
    ├── ConnectionLostError     the connection broke
    ├── OperationTimeoutError   no answer in time (also a TimeoutError)
    ├── AmbiguousWriteError     a write that may have been applied, .cause: 0xa3, or no answer
    ├── AuthenticationError     wrong user or password
    ├── TopologyError           the cluster configuration cannot be used
    ├── CheckpointError         a checkpoint is damaged, unusable, or belongs to another selection
    ├── StreamViolationError    a stream broke the rules of DCP
    ├── HistoryBranchedError    a partition needs a rollback, and on_rollback is "fail"
    └── StatusError             the server answered with a status other than OK
        ├── NotFoundError       0x01
        ├── ExistsError         0x02: the document, or the stream, already exists
        ├── CasMismatchError    0x02 if the request had a CAS
        ├── TooBigError         0x03
        ├── InvalidRequestError 0x04
        ├── NotMyVbucketError   0x07, .config is the body
        ├── RangeError          0x22
        ├── RollbackRequiredError 0x23, .to_seqno
        ├── NoAccessError       0x24
        ├── UnknownCollectionError 0x88, 0x8c
        ├── UnsupportedError    0x81, 0x83
        ├── DurabilityImpossibleError 0xa1: too few copies are in sync, nothing was changed
        ├── TemporaryError      0x82, 0x85, 0x86: nothing was changed, try again later
        └── ServerError         any other status

`str(error)` is one line: what happened, and where. `error.hint` says what to try.
A write that fails with any error but AmbiguousWriteError has changed nothing.
`error.retry` is True if the same request can be sent again. TRANSIENT lists the errors that may go
away with a new connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from errno import errorcode
from typing import ClassVar, Final

from dcp.wire.status import ERROR_TABLE, Status

_REASONS: Final = {
    "ECONNREFUSED": "connection refused",
    "ETIMEDOUT": "timed out",
    "EHOSTUNREACH": "no route to host",
    "ENETUNREACH": "network unreachable",
}


class DcpdError(Exception):
    """Base class of all client errors. Attributes that do not apply are None."""

    retry: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""
    may_have_applied: bool = False
    """Whether the change of this operation may have been applied. Read the document to find out."""

    def __init__(
        self,
        what: str,
        *,
        status: int | None = None,
        vb_id: int | None = None,
        key: bytes | None = None,
        node: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.status = status
        self.vb_id = vb_id
        self.key = key
        self.node = node
        self.hint = self.default_hint if hint is None else hint
        super().__init__(what)

    def __str__(self) -> str:
        """Return what happened and where, in one line."""
        where = []
        if self.key is not None:
            where.append(f"key {self.key.decode(errors='backslashreplace')!r}")
        if self.vb_id is not None:
            where.append(f"partition {self.vb_id}")
        if self.node is not None:
            where.append(f"node {self.node}")
        return f"{self.what} ({', '.join(where)})" if where else self.what


class NotJsonError(DcpdError):
    """A document was read as JSON, and its value is something else."""

    default_hint = "Read its bytes with get."


class ConnectError(DcpdError):
    """The client cannot connect."""

    retry = True
    default_hint = "Check that the server is running and the address is right. Start one: dcpd"

    @classmethod
    def of(cls, error: OSError, node: str) -> ConnectError:
        """Return the error for a failed connection attempt."""
        # asyncio's text is only "Connect call failed (address)", so the reason comes from errno.
        name = errorcode.get(error.errno or 0)
        reason = _REASONS.get(name or "", error.strerror or str(error))
        return cls(f"cannot connect: {reason}", node=node)


class WrongProtocolError(ConnectError):
    """The port answers, but does not speak the key-value protocol."""

    retry = False
    default_hint = "Check that this is the key-value port of a dcpd (11210 unless you changed it)."

    @classmethod
    def of_bytes(cls, received: bytes, why: str, node: str) -> WrongProtocolError:
        """Return the error for bytes that are not part of the protocol; `why` says what is wrong.

        HTTP has its own text: the admin port is easily mistaken for the key-value port.
        """
        if not received.startswith(b"HTTP/"):
            return cls(f"the peer does not speak the protocol: {why}", node=node)
        return cls(
            "this port answers with HTTP: it is an admin port or a web server",
            node=node,
            hint="Use the key-value port (11210 by default). dcpd prints both ports when it starts,"
            " and dcpctl finds the admin port through the key-value port.",
        )


class ConnectionLostError(DcpdError):
    """The connection broke while requests were pending."""

    default_hint = "Check that the server is running: dcpctl status"


class OperationTimeoutError(DcpdError, TimeoutError):
    """The server did not answer within the timeout."""

    default_hint = "Increase the timeout, or check the server: dcpctl status"


class AmbiguousWriteError(DcpdError):
    """A write may have been applied, or not: nobody knows.

    It was sent, and then no answer came (`cause` says why), or the server answered that it cannot
    tell (status 0xa3). It may also be applied later than this error, or lost in a failover. A write
    is not repeated then: a counter could count twice, and a SET could overwrite a later one.
    """

    default_hint = (
        "Read the document: its value tells whether the change is there. Repeat the change if it is"
        " not. A change with a CAS can be repeated as it is: it is applied once at most."
    )
    may_have_applied = True
    cause: DcpdError | None = None
    """Why the answer is missing; None: the server said so."""


class AuthenticationError(DcpdError):
    """The server refused the user or the password."""

    default_hint = (
        "Check the user and the password (dcpctl: --user, and a prompt, --password-file or"
        " DCPCTL_PASSWORD). guest/guest works from loopback only; dcpctl user add NAME adds a user."
    )


class TopologyError(DcpdError):
    """The cluster configuration cannot be used."""


class CheckpointError(DcpdError):
    """A checkpoint cannot be read, used or written.

    It is damaged, has another format, or belongs to another selection of documents.
    """


class EpochGoneError(DcpdError):
    """A member of a group has an older epoch than who has its partitions now. Whoever stores
    positions raises it, and `GroupMember.run` waits for the next share.
    """


class StreamViolationError(DcpdError):
    """A stream broke the rules of DCP. The text says how, in which partition, at which seqno."""


class HistoryBranchedError(DcpdError):
    """A rollback to `to_seqno` is needed, and `on_rollback` is "fail"."""

    default_hint = (
        "Undo your changes above that seqno, or read the partition from 0, then start again."
    )
    to_seqno: int = 0


class StatusError(DcpdError):
    """The server answered with a status other than OK."""


class NotFoundError(StatusError):
    """The document does not exist, or whatever else the request named."""

    default_hint = "Keys match byte by byte. dcpctl keys lists them."


class ExistsError(StatusError):
    """The document already exists."""

    default_hint = "Use set or replace to overwrite it."


class CasMismatchError(StatusError):
    """The document changed since the CAS was read."""

    default_hint = "Read the document again and repeat the change with the new CAS."


class TooBigError(StatusError):
    """The value is larger than the server accepts."""

    default_hint = "The maximum size of a value is 20 MiB."


class InvalidRequestError(StatusError):
    """The server rejected the request as invalid."""


class NotMyVbucketError(StatusError):
    """The node does not serve the partition. `config` is the cluster configuration in its answer,
    or b"".
    """

    retry = True
    config: bytes = b""


class RangeError(StatusError):
    """A seqno is outside the partition's range."""

    default_hint = "The position does not belong to this partition's history. Start again at 0."


class RollbackRequiredError(StatusError):
    """The server requires a rollback to `to_seqno`."""

    to_seqno: int = 0


class NoAccessError(StatusError):
    """The user is not allowed to do this."""

    default_hint = "An admin can show and grant roles: dcpctl user show NAME, dcpctl user grant"


class UnknownCollectionError(StatusError):
    """The collection or scope does not exist."""

    default_hint = (
        "If the collection was dropped and created again, its id is new: look it up by name."
    )


class UnsupportedError(StatusError):
    """The server does not know the command."""


class AmbiguousStatusError(AmbiguousWriteError, StatusError):
    """The server applied the change, and does not know whether it is kept (status 0xa3)."""


class DurabilityImpossibleError(StatusError):
    """Too few copies are in sync for this durability level. Nothing was changed."""

    default_hint = (
        "Wait until a majority of the copies is in sync (dcpctl cluster status), or write without"
        " a durability level."
    )


class TemporaryError(StatusError):
    """The server cannot do it now. Nothing was changed."""

    retry = True
    default_hint = "Try again in a moment."


class ServerError(StatusError):
    """The server answered with any other error status."""


TRANSIENT: Final = (
    ConnectError, ConnectionLostError, OperationTimeoutError, TemporaryError, TopologyError,
)  # fmt: skip
"""Errors that may go away with a new attempt: a server restarts, or a partition moves.

This is about connections and streams. `DcpdError.retry` says whether a request may be repeated.
"""


def none_answered(last: DcpdError, places: Sequence[tuple[str, int]]) -> DcpdError:
    """Return the error for several nodes, none of which answered; the last failed with `last`."""
    if len(places) == 1:
        return last
    return ConnectError(f"none of the {len(places)} nodes answered; the last one: {last}")


_CLASSES: dict[int, type[StatusError]] = {
    Status.KEY_ENOENT: NotFoundError,
    Status.KEY_EEXISTS: ExistsError,
    Status.E2BIG: TooBigError,
    Status.EINVAL: InvalidRequestError,
    Status.NOT_MY_VBUCKET: NotMyVbucketError,
    Status.ERANGE: RangeError,
    Status.ROLLBACK: RollbackRequiredError,
    Status.EACCESS: NoAccessError,
    Status.UNKNOWN_COLLECTION: UnknownCollectionError,
    Status.UNKNOWN_SCOPE: UnknownCollectionError,
    Status.UNKNOWN_COMMAND: UnsupportedError,
    Status.NOT_SUPPORTED: UnsupportedError,
    Status.ENOMEM: TemporaryError,
    Status.EBUSY: TemporaryError,
    Status.ETMPFAIL: TemporaryError,
    Status.SYNC_WRITE_AMBIGUOUS: AmbiguousStatusError,
    Status.DURABILITY_IMPOSSIBLE: DurabilityImpossibleError,
}
TEMPORARY_STATUSES: Final = frozenset(
    status for status, error_class in _CLASSES.items() if error_class is TemporaryError
)
"""Statuses after which the same request may succeed later. Nothing was changed."""


def error_from_status(
    status: int,
    operation: str,
    *,
    body: bytes = b"",
    cas: int = 0,
    vb_id: int | None = None,
    key: bytes | None = None,
    node: str | None = None,
) -> StatusError:
    """Return the error for a response's status.

    `operation` names the request. `cas` is the CAS of the request. `body` is the value of the
    response; if it has a JSON error context, that becomes part of the text.
    """
    error_class = _CLASSES.get(status, ServerError)
    if error_class is ExistsError and cas:
        error_class = CasMismatchError
    name, text = _described(status)
    context = error_context(body) if status != Status.NOT_MY_VBUCKET else ""
    if status == Status.KEY_EEXISTS and context in {"", text}:
        # This status has two meanings. The request tells which.
        context = "CAS mismatch" if cas else "already exists"
    what = f"{operation}: {context or text} ({name + ' ' if name else ''}0x{status:02x})"
    error = error_class(what, status=status, vb_id=vb_id, key=key, node=node)
    if isinstance(error, NotMyVbucketError):
        error.config = body
    elif isinstance(error, RollbackRequiredError) and len(body) >= 8:
        error.to_seqno = int.from_bytes(body[:8], "big")
    return error


def error_context(body: bytes) -> str:
    """Return the context of a JSON error body ({"error": {"context": ...}}), otherwise ""."""
    if not body.startswith(b"{"):
        return ""
    import json

    try:
        document = json.loads(body)
    except ValueError:
        return ""
    error = document.get("error")
    context = error.get("context") if isinstance(error, dict) else None
    return context if isinstance(context, str) else ""


def _described(status: int) -> tuple[str, str]:
    """Return name and meaning of a status, or ("", "unknown status")."""
    known = next((known for known in ERROR_TABLE if known == status), None)
    return ERROR_TABLE[known][:2] if known is not None else ("", "unknown status")
