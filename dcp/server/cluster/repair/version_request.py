"""X_READ_VERSIONS at another node: the login and the request, as what is said on one connection.

Who calls it: `dcp.server.cluster.repair.peer_repair`.
"""

from __future__ import annotations

from typing import Final

from dcp.server.cluster.member_link import LoginRefusedError, NodeLogin, refusal_of
from dcp.session.nodes.version_reads import RANGE, VersionsRead, read_answer
from dcp.wire.frame import MAX_BODY_BYTES, Frame, pack_request
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status


class VersionsRequest:
    """The login at another node and the request, as what is said on a connection."""

    body_bytes_max: Final = MAX_BODY_BYTES

    def __init__(self, login: NodeLogin, vb_id: int, first_seqno: int, last_seqno: int) -> None:
        self._login = login
        self._packet = pack_request(
            Opcode.X_READ_VERSIONS, vb_id=vb_id, extras=RANGE.pack(first_seqno, last_seqno)
        )
        self.answer: VersionsRead | None = None

    @property
    def is_in(self) -> bool:
        """Whether the answer has come."""
        return self.answer is not None

    def first(self) -> bytes:
        """Return the packet that begins the login."""
        return self._login.first()

    def take(self, frame: Frame) -> bytes:
        """Take an answer; return what to send next. Raises LoginRefusedError, ScramException."""
        if not self._login.is_in:
            return self._login.take(frame) or self._packet
        if frame.opcode != Opcode.X_READ_VERSIONS or frame.status != Status.OK:
            raise refusal_of(frame)
        try:
            self.answer = read_answer(frame)
        except ValueError as error:
            raise LoginRefusedError(f"its answer cannot be read: {error}") from error
        return b""
