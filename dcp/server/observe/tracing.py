"""Spans for OpenTelemetry: commands that took long, stream requests, and requests of operators.

It is an extra (`pip install '.[otel]'`), and off unless the setting `otel` is on. Where spans go,
and how many are sampled, the standard OTEL_* variables of the environment say. Spans are made when
their work is over, from times that are measured anyway, and sent by a thread of the SDK.

A client gives its own span as a W3C traceparent: in frame info 3 of a request (kv_engine's former
OpenTracing context), in the DCP control `traceparent`, or in the header of an HTTP request. Then
the span here is a child of that one. What is no traceparent is ignored, as the standard says.

Invariant: nothing here is called while the setting is off.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from dcp.stream.hub import BatchTrace, StreamHub
from dcp.wire.frame import HEADER_BYTES
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE: Final = "dcpd"
CLOSE_S: Final = 1.0
"""How long a stop waits for a collector. The SDK would try for ten seconds."""
_STATUS_NAMES: Final = {int(status): status.name for status in Status}
Facts = dict[str, str | int]
"""Attributes of a span."""


class TracingMissingError(Exception):
    """The packages of the extra are not installed."""


class Tracing:
    """See the module. Lives on the event loop; `close` it at the end."""

    def __init__(
        self, hub: StreamHub, slow_s: float, *, instance: str, exporter: SpanExporter | None = None
    ) -> None:
        """`slow_s`: commands that took so long get a span. `exporter` None: OTLP over HTTP. Raises
        TracingMissingError.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise TracingMissingError(
                f"--otel on needs a package that is not installed ({error.name}). Install the "
                "extra: pip install '.[otel]'"
            ) from error
        self.slow_s = slow_s
        self._hub = hub
        resource = Resource.create({"service.name": SERVICE, "service.instance.id": instance})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer(SERVICE)

    def begin(self, traced: BatchTrace) -> None:
        """A session is about to take a batch; what that says about spans goes there."""
        traced.parent = ""
        self._hub.trace = traced

    def answered(
        self, name: str, answers: bytes, seconds: float, traced: BatchTrace, facts: Facts
    ) -> None:
        """A batch that begins with this command was answered just now. Each stream request gets a
        span, whatever it took.
        """
        if seconds >= self.slow_s:
            self._span(name, seconds, traced.parent, facts)
        if traced.asked:
            self._streams(answers, seconds, traced, facts)

    def _streams(self, answers: bytes, seconds: float, traced: BatchTrace, facts: Facts) -> None:
        at = 0
        while at + HEADER_BYTES <= len(answers):
            head = answers[at : at + HEADER_BYTES]
            opaque = int.from_bytes(head[12:16], "big")
            if head[1] == Opcode.DCP_STREAM_REQ and opaque in traced.asked:
                status = int.from_bytes(head[6:8], "big")
                found: Facts = {
                    "dcpd.vbucket": traced.asked.pop(opaque),
                    "dcpd.status": _STATUS_NAMES.get(status, f"0x{status:02x}"),
                }
                self._span(Opcode.DCP_STREAM_REQ.name, seconds, traced.parent, found | facts)
            at += HEADER_BYTES + int.from_bytes(head[8:12], "big")

    def request(self, name: str, seconds: float, parent: bytes, facts: Facts) -> None:
        """A request of the admin interface was answered just now."""
        self._span(name, seconds, parent.decode("ascii", "replace"), facts)

    def close(self) -> None:
        """Send what is left, for CLOSE_S at most. It waits for that, so call it in a thread."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)

    def _span(self, name: str, seconds: float, parent: str, facts: Facts) -> None:
        from opentelemetry.trace import SpanKind

        end_ns = time.time_ns()
        span = self._tracer.start_span(
            name, _context_of(parent), SpanKind.SERVER, attributes=facts,
            start_time=end_ns - int(seconds * 1e9),
        )  # fmt: skip
        span.end(end_ns)


def _context_of(parent: str) -> Context | None:
    """Return the context of a traceparent. OpenTelemetry reads it, and ignores what is none."""
    if not parent:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": parent})
