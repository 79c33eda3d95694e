"""A loopback peer that speaks just enough of the wire, and misbehaves when a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import TracebackType

from dcp.wire.feature import Feature
from dcp.wire.frame import Frame, FrameDecoder, pack_request, pack_response
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status

GRANTED = (Feature.MUTATION_SEQNO, Feature.COLLECTIONS)
Answer = bytes | None
"""Bytes to write; None = close the connection."""


class ScriptedPeer:
    """`handlers[opcode]` may replace an answer; `requests` has every frame that came."""

    def __init__(self) -> None:
        self.port = 0
        self.documents: dict[bytes, bytes] = {}
        self.requests: list[Frame] = []
        self.handlers: dict[int, Callable[[Frame], Answer]] = {}
        self.config: bytes | None = b""
        """b"" = the peer itself holds everything; None = it has no configuration."""
        self.trickles = False
        """Answers come byte by byte, with pauses."""
        self.connections = 0
        self.held = asyncio.Event()
        """Answers wait for it."""
        self.held.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> ScriptedPeer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        if self.config == b"":
            self.config = config_of([self.port])
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def opcodes(self) -> list[int]:
        return [frame.opcode for frame in self.requests]

    def drop_connections(self) -> None:
        for writer in list(self._writers):
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        decoder = FrameDecoder()
        try:
            while data := await reader.read(65536):
                for frame in decoder.feed(data):
                    self.requests.append(frame)
                    await self.held.wait()
                    handler = self.handlers.get(frame.opcode, self.answer)
                    answer = handler(frame)
                    if answer is None:
                        return
                    pieces = [bytes([byte]) for byte in answer] if self.trickles else [answer]
                    for piece in pieces:
                        writer.write(piece)
                        if self.trickles:
                            await writer.drain()
                            await asyncio.sleep(0.05)
        except ConnectionError:
            return
        finally:
            self._writers.discard(writer)
            writer.close()

    def answer(self, frame: Frame) -> bytes:
        """Answer as a well-behaved server of one node does."""
        match frame.opcode:
            case Opcode.HELLO:
                asked = {
                    int.from_bytes(frame.value[at : at + 2], "big")
                    for at in range(0, len(frame.value), 2)
                }
                granted = b"".join(code.to_bytes(2, "big") for code in GRANTED if code in asked)
                return reply(frame, value=granted)
            case Opcode.SASL_AUTH | Opcode.SELECT_BUCKET:
                return reply(frame)
            case Opcode.GET_CLUSTER_CONFIG:
                if self.config is None:
                    return reply(frame, Status.KEY_ENOENT)
                return reply(frame, value=self.config)
            case Opcode.GET:
                value = self.documents.get(frame.key[1:])
                if value is None:
                    return reply(frame, Status.KEY_ENOENT)
                return reply(frame, value=value, extras=bytes(4), cas=7)
            case Opcode.SET:
                self.documents[frame.key[1:]] = frame.value
                token = (5).to_bytes(8, "big") + len(self.documents).to_bytes(8, "big")
                return reply(frame, extras=token, cas=8)
            case Opcode.DELETE:
                found = self.documents.pop(frame.key[1:], None) is not None
                return reply(frame, Status.OK if found else Status.KEY_ENOENT)
            case Opcode.STAT:
                return (
                    reply(frame, key=b"uptime", value=b"3")
                    + reply(frame, key=b"version", value=b"9.9.9")
                    + reply(frame)
                )
            case _:
                return reply(frame, Status.UNKNOWN_COMMAND)


def reply(frame: Frame, status: int = 0, **parts: int | bytes) -> bytes:
    """Return a response to a request."""
    return pack_response(frame.opcode, status, opaque=frame.opaque, **parts)  # type: ignore[arg-type]


def push(frame: Frame) -> bytes:
    """Return a request that the server sends by itself, as a configuration push is."""
    return pack_request(0x01, opaque=frame.opaque)


def config_of(
    ports: list[int], owners: list[int] | None = None, rev: int = 1, mgmt: int = 8091
) -> bytes:
    """Return a cluster configuration: node per port, `owners[vb]` = index of its node."""
    owners = [0] * 1024 if owners is None else owners
    return json.dumps(
        {
            "rev": rev,
            "revEpoch": 1,
            "nodeLocator": "vbucket",
            "nodes": [{"hostname": f"$HOST:{8091 + n}"} for n in range(len(ports))],
            "nodesExt": [
                {"hostname": "$HOST", "services": {"mgmt": mgmt + n, "kv": port}}
                for n, port in enumerate(ports)
            ],
            "vBucketServerMap": {"vBucketMap": [[owner] for owner in owners]},
        }
    ).encode()
