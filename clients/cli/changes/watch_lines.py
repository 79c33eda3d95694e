"""The lines that `dcpctl watch` prints.

JSON lines (`-o json`), one object per event, `"v": 1`:

    event      mutation, deletion, rollback; with --all also snapshot_start, snapshot_end,
               stream_opened, stream_ended; stream_failed
    vb         partition
    mutation   key, value, seqno, rev, cas, flags, expiry (absolute seconds, 0 = never)
    deletion   key, seqno, rev, cas
    cut        time (a CAS); at (the same in words): with --cuts, after the changes up to it
    rollback   to (undo your changes above this seqno), server_seqno, from, reason

With --collection, mutations and deletions have the name of their `collection`. `cas` and `vb_uuid`
are decimal strings. A value that is a JSON object or array is JSON (`value_encoding` = "json");
other values are text, or base64 if they are not UTF-8 (`value_encoding` = "base64"). --value
chooses otherwise. A key that is not UTF-8 is base64, marked with `key_encoding`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from clients.cli.output import (
    SCHEMA_VERSION,
    ValueStyle,
    cut_to_width,
    shown,
    table_width,
    text_fields,
    value_fields,
)
from clients.consumer.batch_reader import Cut
from clients.event import (
    Deletion,
    Differences,
    Event,
    Mutation,
    Rollback,
    SeqnoAdvanced,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    StreamFailed,
    StreamOpened,
    SystemEvent,
)
from vbucket.model.ids import time_ns_from_cas
from vbucket.model.manifest import SystemEventKind

Render = Callable[[Event | Cut], bytes]

_encode = msgspec.json.Encoder().encode


def document_of(
    event: Event, style: ValueStyle = "json", collections: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Return an event as a JSON document; see the module. `collections`: names by id, None if all
    events are of the default one.
    """
    head: dict[str, Any] = {"v": SCHEMA_VERSION, "event": _NAMES[type(event)], "vb": event.vb_id}
    if collections is not None and isinstance(event, Mutation | Deletion):
        head["collection"] = collections.get(event.collection_id, f"0x{event.collection_id:x}")
    match event:
        case Mutation():
            return head | text_fields("key", event.key) | value_fields(event.value, style) | {
                "seqno": event.seqno, "rev": event.rev_seqno, "cas": str(event.cas),
                "flags": event.flags, "expiry": event.expiry_s,
            }  # fmt: skip
        case Deletion():
            return head | text_fields("key", event.key) | {
                "seqno": event.seqno, "rev": event.rev_seqno, "cas": str(event.cas),
            }  # fmt: skip
        case Rollback():
            return head | {
                "to": event.to_seqno, "server_seqno": event.server_seqno,
                "from": event.from_seqno, "reason": event.reason,
            }  # fmt: skip
        case Differences():
            raise AssertionError("dcpctl holds nothing")
        case SnapshotStart():
            return head | {"start": event.start_seqno, "end": event.end_seqno}
        case SnapshotEnd():
            return head | {"end": event.end_seqno}
        case SeqnoAdvanced():
            return head | {"seqno": event.seqno}
        case SystemEvent():
            return head | {
                "seqno": event.seqno, "kind": SystemEventKind(event.kind).name.lower(),
                "manifest": f"{event.manifest_uid:x}", "scope": f"{event.scope_id:x}",
                "collection": f"{event.collection_id:x}", "name": event.name,
            }  # fmt: skip
        case StreamOpened():
            versions = [[str(vb_uuid), seqno] for vb_uuid, seqno in event.failover_log]
            return head | {"seqno": event.start_seqno, "versions": versions}
        case StreamEnded():
            return head | {"reason": event.reason_text, "will_resume": event.will_resume}
        case StreamFailed():
            return head | {"status": event.status, "what": event.what, "try": event.hint}


_NAMES: Final = {
    Mutation: "mutation",
    Deletion: "deletion",
    Rollback: "rollback",
    SnapshotStart: "snapshot_start",
    SnapshotEnd: "snapshot_end",
    SeqnoAdvanced: "seqno_advanced",
    SystemEvent: "system_event",
    StreamOpened: "stream_opened",
    StreamEnded: "stream_ended",
    StreamFailed: "stream_failed",
}


def renderer(mode: str, style: ValueStyle, collections: Mapping[int, str] | None) -> Render:
    """Return the function that turns an event into a line; `mode` is that of -o."""
    width = table_width()

    def render(event: Event | Cut) -> bytes:
        if isinstance(event, Cut):
            return cut_line(mode, event)
        if mode == "json":
            return _encode(document_of(event, style, collections)) + b"\n"
        if mode == "raw":
            return _raw_value(event)
        return _plain_line(event) if mode == "plain" else _table_line(event, width)

    return render


def cut_line(mode: str, cut: Cut) -> bytes:
    """Return the line after the changes up to a cut."""
    seconds, nanoseconds = divmod(time_ns_from_cas(cut.time), 10**9)
    moment = datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    at = f"{moment}.{nanoseconds // 1_000_000:03d}Z"
    if mode == "json":
        document = {"v": SCHEMA_VERSION, "event": "cut", "time": str(cut.time), "at": at}
        return _encode(document) + b"\n"
    return b"" if mode == "raw" else f"-- cut {at}\n".encode()


def _plain_line(event: Event) -> bytes:
    seqno, what, text = _parts(event)
    return f"{event.vb_id} #{seqno} {what} {text}\n".encode(errors="surrogateescape")


def _table_line(event: Event, width: int) -> bytes:
    seqno, what, text = _parts(event)
    line = f"{event.vb_id:>5} {seqno:>10}  {what:<8}  {text}"
    return f"{cut_to_width(line, width)}\n".encode(errors="surrogateescape")


def _parts(event: Event) -> tuple[object, str, str]:
    """Return seqno, what happened, and the rest, for plain lines and tables."""
    seqno: object
    match event:
        case Mutation():
            seqno, what = event.seqno, "set"
            text = f"{shown(event.key)} = {shown(event.value)}"
        case Deletion():
            seqno, what, text = event.seqno, "expired" if event.is_expiry else "del", ""
            text = shown(event.key)
        case Rollback():
            seqno, what, text = event.to_seqno, "ROLLBACK", event.reason
        case _:
            document = document_of(event)
            seqno = document.get("end", document.get("seqno", ""))
            what = document["event"]
            text = " ".join(
                f"{name}={value}"
                for name, value in document.items()
                if name not in {"v", "event", "vb", "end", "seqno"}
            )
    return seqno, what, text


def _raw_value(event: Event) -> bytes:
    return event.value + b"\n" if isinstance(event, Mutation) else b""


class CollectionNames(dict[int, str]):
    """Collection id -> scope.collection. Names of dropped collections stay: their last changes may
    still come.
    """

    def __init__(self, manifest: bytes) -> None:
        """`manifest`: the answer to GET_COLLECTIONS_MANIFEST."""
        scopes = json.loads(manifest)["scopes"]
        super().__init__(
            (int(item["uid"], 16), f"{scope['name']}.{item['name']}")
            for scope in scopes
            for item in scope["collections"]
        )
        self._scopes = {int(scope["uid"], 16): str(scope["name"]) for scope in scopes}

    def learn(self, event: SystemEvent) -> None:
        """Take a name from a system event."""
        if event.kind == SystemEventKind.CREATE_SCOPE:
            self._scopes[event.scope_id] = event.name
        elif event.kind == SystemEventKind.CREATE_COLLECTION:
            scope = self._scopes.get(event.scope_id, f"0x{event.scope_id:x}")
            self[event.collection_id] = f"{scope}.{event.name}"
