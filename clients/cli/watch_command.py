"""dcpctl watch: print changes as they happen; can be resumed.

JSON lines (`-o json`), one object per event, `"v": 1`:

    event      mutation, deletion, rollback; with --all also snapshot_start, snapshot_end,
               stream_opened, stream_ended; stream_failed
    vb         partition
    mutation   key, value, seqno, rev, cas, flags, expiry (absolute seconds, 0 = never)
    deletion   key, seqno, rev, cas
    rollback   to (undo your changes above this seqno), server_seqno, from, reason

`cas` and `vb_uuid` are decimal strings. Keys and values that are not UTF-8 are base64, marked with
`key_encoding` or `value_encoding` = "base64". With --state, positions are saved every second, at
the end, and on SIGINT and SIGTERM. A position is saved after its lines were written. A state file
belongs to one --prefix; with another one the command fails.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec

from clients.checkpoint.checkpoint import CheckpointFile
from clients.cli.dcpctl import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PARTIAL,
    Target,
    help_text,
    with_target,
)
from clients.cli.output import SCHEMA_VERSION, shown, text_fields
from clients.consumer.consumer import Consumer
from clients.event import (
    Deletion,
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
from vbucket.model.ids import NUM_VBUCKETS
from vbucket.model.manifest import SystemEventKind

SAVE_INTERVAL_S: Final = 1.0

_CHANGES: Final = (Mutation, Deletion)
_ALWAYS: Final = (Mutation, Deletion, Rollback, StreamFailed)


@click.command(
    "watch",
    help=help_text(
        "Stream changes of all partitions, or of some. If the server's history branched, a rollback"
        " line says which seqno of the partition to go back to: changes above it are undone.",
        "dcpctl watch",
        "dcpctl watch --from now -o json",
        "dcpctl watch --state changes.ckpt -o json >> changes.ndjson",
        "dcpctl watch --until-now --vb 17",
    ),
)
@click.option(
    "--vb", "vb_ids", type=click.IntRange(0, NUM_VBUCKETS - 1), multiple=True, metavar="N",
    help="Only this partition; may be repeated.",
)  # fmt: skip
@click.option(
    "--from", "start", type=click.Choice(["beginning", "now"]), default="beginning",
    show_default=True, help="Where to begin partitions that are not in --state.",
)  # fmt: skip
@click.option(
    "--state", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Resume from this file, and save positions there.",
)  # fmt: skip
@click.option("--until-now", is_flag=True, help="Stop after the changes that exist now.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N changes.")
@click.option("--prefix", default="", metavar="TEXT", help="Only keys with this prefix.")
@click.option("--all", "show_all", is_flag=True, help="Show snapshots and stream events too.")
@click.option(
    "--rollback-to", type=click.Choice(["state", "beginning"]), default="state", show_default=True,
    help="Go back to the newest complete state, or stream the partition again from 0.",
)  # fmt: skip
@with_target
def watch(
    *,
    target: Target,
    vb_ids: tuple[int, ...],
    start: Literal["beginning", "now"],
    state: Path | None,
    until_now: bool,
    count: int | None,
    prefix: str,
    show_all: bool,
    rollback_to: Literal["state", "beginning"],
) -> int:
    """Stream changes, resumable."""
    consumer = Consumer(
        target.address,
        vbuckets=vb_ids or None,
        start=start,
        store=CheckpointFile(state) if state is not None else None,
        until_now=until_now,
        rollback_to=rollback_to,
        key_prefixes=[prefix.encode(errors="surrogateescape")] if prefix else (),
        connect_timeout_s=target.timeout_s,
    )
    watcher = _Watcher(
        consumer,
        _FORMATS[target.output_or("plain")],
        count=count,
        kinds=None if show_all else _ALWAYS,
        is_saving=state is not None,
    )
    return asyncio.run(watcher.run(is_finite=until_now or count is not None))


class _Watcher:
    """Prints events and saves positions. A saved position covers only printed events."""

    def __init__(
        self,
        consumer: Consumer,
        render: Callable[[Event], bytes],
        *,
        count: int | None,
        kinds: tuple[type, ...] | None,
        is_saving: bool,
    ) -> None:
        self._consumer = consumer
        self._render = render
        self._left = count
        self._kinds = kinds
        self._is_saving = is_saving
        self._signal: signal.Signals | None = None
        self._has_failed = False

    async def run(self, *, is_finite: bool) -> int:
        """Watch until the end or a signal; return the exit code."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(self._watch())

        def stop(number: signal.Signals) -> None:
            self._signal = number
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            await task
        except asyncio.CancelledError:
            if self._signal is None:
                raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        if self._signal is signal.SIGINT:
            return EXIT_INTERRUPTED
        if self._signal is not None:
            return EXIT_PARTIAL if is_finite else EXIT_OK
        return EXIT_FAILED if self._has_failed else EXIT_OK

    async def _watch(self) -> None:
        async with self._consumer as consumer:
            saver = asyncio.create_task(self._save_regularly())
            try:
                async for events in consumer.batches():
                    if self._print(events):
                        return
            finally:
                saver.cancel()
                await asyncio.gather(saver, return_exceptions=True)
                if self._is_saving:
                    await consumer.save()

    async def _save_regularly(self) -> None:
        while self._is_saving:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await self._consumer.save()

    def _print(self, events: Sequence[Event]) -> bool:
        """Print a batch; return True when --count is reached."""
        render, kinds = self._render, self._kinds
        lines = []
        is_enough = False
        for position, event in enumerate(events, 1):
            if kinds is not None and not isinstance(event, kinds):
                continue
            if isinstance(event, StreamFailed):
                self._has_failed = True
                click.echo(f"dcpctl: {event.what}\n  try: {event.hint}", err=True)
            if isinstance(event, _CHANGES) and self._left is not None:
                self._left -= 1
                is_enough = not self._left
            lines.append(render(event))
            if is_enough:
                self._consumer.handed_out(position)
                break
        sys.stdout.buffer.write(b"".join(lines))
        sys.stdout.buffer.flush()
        return is_enough


# -- formats ---------------------------------------------------------------------------------------

_encode = msgspec.json.Encoder().encode


def document_of(event: Event) -> dict[str, Any]:
    """Return an event as a JSON document; see the module."""
    head = {"v": SCHEMA_VERSION, "event": _NAMES[type(event)], "vb": event.vb_id}
    match event:
        case Mutation():
            return head | text_fields("key", event.key) | text_fields("value", event.value) | {
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


def _json_line(event: Event) -> bytes:
    return _encode(document_of(event)) + b"\n"


def _plain_line(event: Event) -> bytes:
    return _line(event, "{vb} #{seqno} {what} {text}\n")


def _table_line(event: Event) -> bytes:
    return _line(event, "{vb:>5} {seqno:>10}  {what:<8}  {text}\n")


def _line(event: Event, layout: str) -> bytes:
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
    line = layout.format(vb=event.vb_id, seqno=seqno, what=what, text=text)
    return line.encode(errors="surrogateescape")


def _raw_value(event: Event) -> bytes:
    return event.value + b"\n" if isinstance(event, Mutation) else b""


_FORMATS: Final[dict[str, Callable[[Event], bytes]]] = {
    "json": _json_line,
    "plain": _plain_line,
    "table": _table_line,
    "raw": _raw_value,
}
