"""Spans for OpenTelemetry, as a collector receives them, and what the log says with names."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.request import Request, urlopen

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from clients.testing import DcpServer
from dcp.server.main import ExitCode
from dcp.server.observe.tracing import Tracing
from dcp.stream.hub import BatchTrace, StreamHub
from dcp.wire.frame import pack_request, pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from support.raw_client import RawClient

ROOT = Path(__file__).parents[2]
DCP_OPEN = struct.pack(">II", 0, 1)
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01".encode()


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """An OTLP receiver: its URL, and the spans that have come."""
    spans: list[Span] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                assert names["service.name"] == "dcpd"
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class SilentExporter(SpanExporter):
    """Sends, until it may end."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = Event(), Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_begun.set()
        self.may_end.wait(60)
        return SpanExportResult.FAILURE


def facts(span: Span) -> dict[str, str | int]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def with_trace(opcode: int, traceparent: bytes, **parts: bytes | int) -> bytes:
    """A flex request with frame info 3."""
    framing = bytes([3 << 4 | 15, len(traceparent) - 15]) + traceparent
    extras, key = parts.get("extras", b""), parts.get("key", b"")
    body = framing + extras + key
    head = struct.pack(
        ">BBBBBBHIIQ", 0x08, opcode, len(framing), len(key), len(extras), 0,
        parts.get("vb_id", 0), len(body), 77, 0,
    )  # fmt: skip
    return head + body


def asked_stream(opaque: int, vb_id: int) -> bytes:
    """A request for a stream from 0, which is open until the connection ends."""
    extras = struct.pack(">IIQQQQQ", 0, 0, 0, 2**64 - 1, 0, 0, 0)
    return pack_request(Opcode.DCP_STREAM_REQ, vb_id=vb_id, opaque=opaque, extras=extras)


def test_a_collector_gets_spans_with_the_context_of_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as (url, spans):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        options = ("--otel", "on", "--otel-slow", "0", "--node-name", "n7")
        with DcpServer(tmp_path / "data", *options) as server:
            with RawClient(server.port) as client:
                client.send(with_trace(Opcode.GET, TRACEPARENT, key=b"absent"))
                assert client.receive().status == Status.KEY_ENOENT
                client.send(with_trace(Opcode.GET, b"no traceparent at all", key=b"absent"))
                assert client.receive().status == Status.KEY_ENOENT
                assert client.ask(Opcode.GET, key=b"absent").status == Status.KEY_ENOENT
            with RawClient(server.port) as client:
                assert client.ask(Opcode.DCP_OPEN, key=b"c", extras=DCP_OPEN).status == 0
                answer = client.ask(Opcode.DCP_CONTROL, key=b"traceparent", value=TRACEPARENT)
                assert answer.status == Status.OK
                client.send(asked_stream(5, 17) + asked_stream(6, 1023) + asked_stream(7, 17))
                assert {client.receive().opaque for _ in range(3)} == {5, 6, 7}
            request = Request(f"{server.admin_url}/api/v1/status")
            request.add_header("Authorization", "Basic Z3Vlc3Q6Z3Vlc3Q=")
            request.add_header("traceparent", TRACEPARENT.decode())
            for each in (request, f"{server.admin_url}/livez"):
                with urlopen(each, timeout=30):
                    pass
            assert server.stop() == 0
    gets = [span for span in spans if span.name == "GET"]
    assert [span.parent_span_id.hex() for span in gets] == [PARENT, "", ""]
    assert gets[0].trace_id.hex() == TRACE
    assert facts(gets[0])["client.address"].startswith("127.0.0.1:")
    streams = [
        span for span in spans if span.name == "DCP_STREAM_REQ" and "dcpd.vbucket" in facts(span)
    ]
    assert {span.parent_span_id.hex() for span in streams} == {PARENT}
    assert [(facts(span)["dcpd.vbucket"], facts(span)["dcpd.status"]) for span in streams] == [
        (17, "OK"), (1023, "OK"), (17, "KEY_EEXISTS"),
    ]  # fmt: skip
    (status,) = (span for span in spans if span.name == "GET /api/v1/status")
    assert (status.trace_id.hex(), status.parent_span_id.hex()) == (TRACE, PARENT)
    assert not [span for span in spans if "livez" in span.name]
    for span in spans:
        assert span.kind == Span.SPAN_KIND_SERVER
        assert span.end_time_unix_nano >= span.start_time_unix_nano > 0


def test_only_slow_commands_and_all_stream_requests_have_spans() -> None:
    hub, exporter = StreamHub(), InMemorySpanExporter()
    tracing = Tracing(hub, 0.1, instance="here", exporter=exporter)
    traced = BatchTrace()
    tracing.begin(traced)
    assert hub.trace is traced
    traced.asked[9] = 3
    answer = pack_response(Opcode.DCP_STREAM_REQ, Status.ROLLBACK, opaque=9, value=bytes(8))
    other = pack_response(Opcode.GET, Status.OK, opaque=9, value=b"v")
    tracing.answered("GET", other + answer + answer, 0.05, traced, {})
    tracing.answered("SET", b"", 0.1, traced, {"enduser.id": "u"})
    tracing.close()
    found = [(span.name, dict(span.attributes)) for span in exporter.get_finished_spans()]
    assert found == [
        ("DCP_STREAM_REQ", {"dcpd.vbucket": 3, "dcpd.status": "ROLLBACK"}),
        ("SET", {"enduser.id": "u"}),
    ]
    assert traced.asked == {}


def test_a_collector_that_says_nothing_holds_up_no_stop() -> None:
    exporter = SilentExporter()
    tracing = Tracing(StreamHub(), 0.0, instance="here", exporter=exporter)
    tracing.answered("SET", b"", 0.1, BatchTrace(), {})
    tracing.close()
    assert exporter.has_begun.is_set()
    assert not exporter.may_end.is_set(), "nobody waited for its end"
    exporter.may_end.set()


def test_a_server_without_the_extra_says_what_to_install(tmp_path: Path) -> None:
    blocked = "import sys; sys.modules['opentelemetry'] = None; "
    done = subprocess.run(
        [
            sys.executable, "-c",
            f"{blocked}from dcp.server.main import main; main()",
            "--otel", "on", "--data", str(tmp_path / "data"), "--port", "0", "--admin-port", "0",
        ],
        capture_output=True, text=True, check=False, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == ExitCode.USAGE
    assert "pip install '.[otel]'" in done.stderr


def test_the_log_has_names_and_keeps_quiet_about_older_maps(tmp_path: Path) -> None:
    with DcpServer(tmp_path / "data", "--log-format", "json") as server:
        with RawClient(server.port) as client:
            assert client.ask(Opcode.GET, vb_id=1, key=b"k", extras=b"x").status == Status.EINVAL
        server.set_state(5, "dead")
        with RawClient(server.port) as client:
            assert client.ask(Opcode.GET, vb_id=5, key=b"k").status == Status.NOT_MY_VBUCKET
        assert server.metrics()['dcpd_refusals_total{status="NOT_MY_VBUCKET"}'] == 1
        server.stop()
        text = server.log_path.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    refused = [line for line in lines if line["event"] == "refused"]
    assert [(line["opcode"], line["status"]) for line in refused] == [("GET", "EINVAL")]
