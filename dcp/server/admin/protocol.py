"""One connection of an admin port: uvicorn's HTTP/1.1, which reports its phase to the crowd.

uvicorn has one deadline, for a connection that is idle after an answer, and any byte switches it
off. So a client that sends a byte now and then, or reads nothing, could stay for ever. This
subclass tells the `Crowd` the phase of the connection after every event; each phase has a deadline.

Requests that are not HTTP, or come too late, get an error document if no answer has begun.

It imports uvicorn, so import this module late.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from dcp.server.admin.answers import PROBLEM_TYPE, SAFE_HEADERS, problem
from dcp.server.net.crowd import Crowd, Phase, Visitor

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

OnRefusal = Callable[[str, HTTPStatus, str], None]
"""Called with the peer's host, the status and the reason."""

NOT_ASCII: Final = 0x80
"""No HTTP request begins with such a byte, and every packet of a key-value client does."""

_ANSWERING: Final = frozenset({h11.SEND_RESPONSE, h11.SEND_BODY})


class AdminProtocol(H11Protocol):
    """See the module."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        crowd: Crowd,
        visitor: Visitor,
        on_refusal: OnRefusal,
    ) -> None:
        super().__init__(config, server_state, app_state, asyncio.get_running_loop())
        self._crowd = crowd
        self._visitor = visitor
        self._on_refusal = on_refusal

    # -- events of the transport -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note that the connection can be used: after the handshake, if there is TLS."""
        super().connection_made(transport)
        self._visitor.end = self._end
        self._visitor.cut = transport.abort
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the crowd."""
        self._crowd.leave(self._visitor)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of requests. A client of the key-value port gets an answer at once: it waits
        for one, and h11 waits for the end of a line.
        """
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None and not self.conn.trailing_data[0] and data[0] >= NOT_ASCII:
            self.send_400_response(
                f"it begins with byte 0x{data[0]:02x}: this is the admin port, and key-value"
                " clients use another one"
            )
        else:
            super().data_received(data)
        self._tell()

    def pause_writing(self) -> None:
        """Note that the client reads too slowly."""
        super().pause_writing()
        self._tell()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        super().resume_writing()
        self._tell()

    # -- events of uvicorn -------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Note that an answer is complete, although perhaps not sent."""
        super().on_response_complete()
        self._tell()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP."""
        status, what = HTTPStatus.BAD_REQUEST, "the request is not valid HTTP"
        self._on_refusal(self._visitor.host, status, f"{what}: {msg}")
        self._answer(status, what, msg, "use HTTP/1.1; HTTPS has another port")
        self.transport.close()

    def shutdown(self) -> None:
        """Close the connection if it has no answer to finish, because the server stops."""
        if not self.transport.is_closing():
            super().shutdown()

    # -- phases ------------------------------------------------------------------------------------

    def _tell(self) -> None:
        self._crowd.moved(self._visitor, self._phase(), self.loop.time())

    def _phase(self) -> Phase:
        if self.transport.is_closing():
            return Phase.CLOSING
        if self.flow.write_paused:
            return Phase.UNREAD
        ours, is_whole = self.conn.our_state, self.conn.their_state is not h11.SEND_BODY
        if ours in _ANSWERING:
            return Phase.BODY if ours is h11.SEND_RESPONSE and not is_whole else Phase.ANSWER
        if not is_whole:
            return Phase.REST
        is_new = self.cycle is None
        return Phase.REQUEST if is_new or self.conn.trailing_data[0] else Phase.IDLE

    def _end(self) -> None:
        """Close the connection, because the deadline of its phase is over."""
        phase = self._visitor.phase
        if phase is Phase.BODY or (phase is Phase.REQUEST and self.conn.trailing_data[0]):
            self._answer(
                HTTPStatus.REQUEST_TIMEOUT,
                "the request did not arrive in time",
                self._crowd.limits.late_text(phase),
                "send the whole request at once",
            )
        if phase in {Phase.UNREAD, Phase.CLOSING}:
            # Otherwise the buffered data would keep the connection, and its memory, for ever.
            self.transport.abort()
        else:
            self.transport.close()

    def _answer(self, status: HTTPStatus, what: str, why: str, try_this: str) -> None:
        """Answer an error document instead of uvicorn, if no answer has begun."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The application may still work on this request; its answer is dropped.
            cycle.disconnected = True
            cycle.message_event.set()
        body = problem(status, what, why, try_this)
        headers = [
            (b"content-type", PROBLEM_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *SAFE_HEADERS,
        ]
        start = h11.Response(
            status_code=status.value, headers=headers, reason=status.phrase.encode()
        )
        # h11 refuses what cannot be sent: after an answer has begun, or a body for HEAD.
        with contextlib.suppress(h11.LocalProtocolError):
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
