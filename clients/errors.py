"""The errors of the clients, as one tree.

    DcpdError                   .status .vb_id .key .node .retry .hint
    ├── ConnectError            nothing listens there, or it does not speak the protocol
    ├── ConnectionLostError     the connection broke with requests pending: their outcome is unknown
    ├── OperationTimeoutError   no answer in time (also a TimeoutError): the outcome is unknown
    ├── AuthenticationError     user or password refused
    ├── TopologyError           the cluster configuration cannot be used
    ├── CheckpointError         a checkpoint is damaged, not one of ours, or of other documents
    ├── StreamViolationError    a stream broke the rules of DCP
    ├── HistoryBranchedError    a partition had to go back, and the consumer was told not to
    └── StatusError             the server answered with a status other than OK
        ├── NotFoundError       0x01
        ├── ExistsError         0x02 of ADD, or of a stream that is there already
        ├── CasMismatchError    0x02 where the request named a CAS
        ├── TooBigError         0x03
        ├── InvalidRequestError 0x04
        ├── NotMyVbucketError   0x07, .config is the body
        ├── RangeError          0x22
        ├── RollbackRequiredError 0x23, .to_seqno
        ├── NoAccessError       0x24
        ├── UnknownCollectionError 0x88, 0x8c
        ├── UnsupportedError    0x81, 0x83
        ├── TemporaryError      0x82, 0x85, 0x86: nothing was done, try again later
        └── ServerError         any other status

`str(error)` says in one line what happened and where; `error.hint` says what to try.
`error.retry` is True if the same request may simply be sent again. TRANSIENT lists the errors that
another connection attempt may cure.
"""

from __future__ import annotations

from errno import errorcode
from typing import ClassVar, Final

from dcp.wire.status import ERROR_TABLE, Status

_REASONS: Final = {
    "ECONNREFUSED": "connection refused",
    "ETIMEDOUT": "timed out",
    "EHOSTUNREACH": "no route to the host",
    "ENETUNREACH": "the network cannot be reached",
}


class DcpdError(Exception):
    """Root of all errors that clients raise. Attributes that do not apply are None."""

    retry: ClassVar[bool] = False
    default_hint: ClassVar[str] = ""

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
            where.append(f"vbucket {self.vb_id}")
        if self.node is not None:
            where.append(f"node {self.node}")
        return f"{self.what} ({', '.join(where)})" if where else self.what


class ConnectError(DcpdError):
    """Nothing listens at the address, or what listens does not speak the protocol."""

    retry = True
    default_hint = "Is the server running, and is the address right? Start one with: dcpd"

    @classmethod
    def of(cls, error: OSError, node: str) -> ConnectError:
        """Return the error for a failed connection attempt."""
        # asyncio says "Connect call failed (address)" where the socket module says the reason.
        name = errorcode.get(error.errno or 0)
        reason = _REASONS.get(name or "", error.strerror or str(error))
        return cls(f"cannot connect: {reason}", node=node)


class ConnectionLostError(DcpdError):
    """The connection broke while requests were pending; a mutation may have been done."""

    default_hint = "Read the document back before repeating a write."


class OperationTimeoutError(DcpdError, TimeoutError):
    """No answer within the timeout; a mutation may have been done."""

    default_hint = "Allow more time, or look at the server's load: dcpctl status"


class AuthenticationError(DcpdError):
    """The server refused the user or the password."""

    default_hint = (
        "Give --user and --password (guest/guest works from loopback only), or add the user:"
        " dcpctl user add NAME"
    )


class TopologyError(DcpdError):
    """The cluster configuration cannot be used."""


class CheckpointError(DcpdError):
    """A checkpoint is damaged, of another format or of other documents, or cannot be written."""


class StreamViolationError(DcpdError):
    """A stream broke the rules of DCP: what, at which partition and seqno."""


class HistoryBranchedError(DcpdError):
    """History branched, and `on_rollback` says to fail; `to_seqno` is where to go back to."""

    default_hint = (
        "Undo what you hold above that seqno, or begin the partition anew, and start again."
    )
    to_seqno: int = 0


class StatusError(DcpdError):
    """The server answered with a status other than OK."""


class NotFoundError(StatusError):
    """There is no such document, or no such thing."""

    default_hint = "Keys are exact bytes; list what changes with: dcpctl watch --until-now"


class ExistsError(StatusError):
    """The document exists already."""

    default_hint = "Use set or replace to overwrite it."


class CasMismatchError(StatusError):
    """The document changed since the CAS was read."""

    default_hint = "Read it again and repeat the change with its new CAS."


class TooBigError(StatusError):
    """The value is larger than the server takes."""

    default_hint = "A value may have 20 MiB at most."


class InvalidRequestError(StatusError):
    """The server found the request invalid."""


class NotMyVbucketError(StatusError):
    """The node does not hold the partition; `config` is the configuration that it sent, or b""."""

    retry = True
    config: bytes = b""


class RangeError(StatusError):
    """A seqno lies outside of what the partition has."""

    default_hint = "The position is not one of this partition's history: start from the beginning."


class RollbackRequiredError(StatusError):
    """History branched: the client has to go back to `to_seqno`."""

    to_seqno: int = 0


class NoAccessError(StatusError):
    """The user may not do this."""

    default_hint = "An admin sees what a user may, and grants more, with: dcpctl user"


class UnknownCollectionError(StatusError):
    """The server has no such collection, or no such scope."""

    default_hint = "Collections are dropped for good; one of the same name is another: ask by name."


class UnsupportedError(StatusError):
    """The server does not know the command."""


class TemporaryError(StatusError):
    """The server cannot do it now and has not done anything."""

    retry = True
    default_hint = "Try again in a moment."


class ServerError(StatusError):
    """Any other refusal."""


TRANSIENT: Final = (
    ConnectError, ConnectionLostError, OperationTimeoutError, TemporaryError, TopologyError,
)  # fmt: skip
"""Errors that another attempt may cure: a server restarts, or a partition moves.

This concerns connections and streams. Whether one request may be repeated is `DcpdError.retry`.
"""


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
}
TEMPORARY_STATUSES: Final = frozenset(
    status for status, error_class in _CLASSES.items() if error_class is TemporaryError
)
"""Refusals after which the same request may be accepted a moment later. Nothing was done."""


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

    `operation` names the request, `body` is the value of the response (its JSON error context is
    used if there is one), `cas` is the CAS of the request.
    """
    error_class = _CLASSES.get(status, ServerError)
    if error_class is ExistsError and cas:
        error_class = CasMismatchError
    name, text = _described(status)
    context = error_context(body) if status != Status.NOT_MY_VBUCKET else ""
    if status == Status.KEY_EEXISTS and context in {"", text}:
        # The status means two things; the request says which.
        context = "CAS mismatch" if cas else "exists already"
    what = f"{operation}: {context or text} ({name + ' ' if name else ''}0x{status:02x})"
    error = error_class(what, status=status, vb_id=vb_id, key=key, node=node)
    if isinstance(error, NotMyVbucketError):
        error.config = body
    elif isinstance(error, RollbackRequiredError) and len(body) >= 8:
        error.to_seqno = int.from_bytes(body[:8], "big")
    return error


def error_context(body: bytes) -> str:
    """Return the text of a JSON error body ({"error": {"context": ...}}), "" for other bodies."""
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
    """Return name and meaning of a status, ("", "unknown status") for an unknown one."""
    known = next((known for known in ERROR_TABLE if known == status), None)
    return ERROR_TABLE[known][:2] if known is not None else ("", "unknown status")
