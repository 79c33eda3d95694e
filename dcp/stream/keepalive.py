"""Whether the client of a connection is still there: NOOPs to it, and its silence. Sans-IO.

Who calls it: the producer, with the steady clock of its `tick`.
"""

from __future__ import annotations

from typing import Final

from dcp.wire.frame import pack_request
from dcp.wire.opcode import Opcode

NOOP_OPAQUE_FIRST: Final = 10_000_001
"""First opaque of the server's own requests, as in kv_engine."""
NOOP_INTERVAL_DEFAULT_NS: Final = 180 * 1_000_000_000
IDLE_CLOSE_NS: Final = 360 * 1_000_000_000
"""A peer that enabled NOOP and is silent for so long is gone (kv_engine: 360 s)."""


class Keepalive:
    """See the module."""

    __slots__ = ("_is_open", "_opaque", "_sent_ns", "heard_ns", "interval_ns", "is_enabled",
                 "took_ns")  # fmt: skip

    def __init__(self) -> None:
        self.is_enabled = False
        """Whether the client wants NOOPs (control enable_noop)."""
        self.interval_ns = NOOP_INTERVAL_DEFAULT_NS
        self.heard_ns = 0
        """When the client sent something last."""
        self.took_ns: int | None = None
        """How long the last NOOP that was answered took; None: none was."""
        self._opaque = NOOP_OPAQUE_FIRST
        self._sent_ns = 0
        self._is_open = False
        """Whether the last NOOP is not answered yet. No other one is sent meanwhile."""

    def answered(self) -> None:
        """The client answered the last NOOP."""
        self._is_open = False
        self.took_ns = self.heard_ns - self._sent_ns

    def tick(self, now_ns: int) -> bytes | None:
        """Let time pass; return the NOOP to send, b"" if none is due. None: the client is gone."""
        if not self.is_enabled:
            return b""
        self.heard_ns = self.heard_ns or now_ns
        self._sent_ns = self._sent_ns or now_ns
        if now_ns - self.heard_ns > IDLE_CLOSE_NS:
            return None
        if self._is_open or now_ns - self._sent_ns < self.interval_ns:
            return b""
        self._sent_ns, self._is_open = now_ns, True
        self._opaque += 1
        return pack_request(Opcode.DCP_NOOP, opaque=self._opaque - 1)
