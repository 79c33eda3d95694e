"""Stream requests of a replica that its master cannot decide yet. Pure.

Who calls it: `failover.replication.replica_feed`.

Invariant: each request that is kept gets one answer, or its link ends.
"""

from __future__ import annotations

from collections.abc import Callable

from dcp.session.replication_port import FeedAnswer
from dcp.wire.frame import Frame, pack_response
from dcp.wire.status import Status


class WaitingRequests:
    """See the module. At most one for each partition. `send` sends an answer."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self._send = send
        self._requests: dict[int, Frame] = {}

    def keep(self, request: Frame) -> None:
        """Keep a request until it can be decided."""
        assert request.vb_id not in self._requests
        self._requests[request.vb_id] = request

    def refuse(self, vb_id: int) -> None:
        """Refuse what is kept for a partition: another request has come, or this is no master."""
        request = self._requests.pop(vb_id, None)
        if request is not None:
            self._answer(request, FeedAnswer(Status.X_FENCED, b""))

    def decide(self, vb_id: int, decide: Callable[[Frame], FeedAnswer | None]) -> None:
        """Decide about what is kept for a partition; it may be kept again."""
        request = self._requests.pop(vb_id, None)
        if request is not None and (answer := decide(request)) is not None:
            self._answer(request, answer)

    def clear(self) -> None:
        """The link is gone."""
        self._requests.clear()

    def _answer(self, request: Frame, answer: FeedAnswer) -> None:
        status, value = answer
        self._send(pack_response(request.opcode, status, opaque=request.opaque, value=value))
