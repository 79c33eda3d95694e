"""dcpctl watch: print changes as they happen; can be resumed.

`watch_lines` describes the lines, `watch_start` the values of --from. With --state, positions are
saved every second, at the end, and on SIGINT and SIGTERM. A position is saved after its lines were
written. A state file belongs to one --prefix and --collection; with others the command fails.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import click

from clients.checkpoint.checkpoint import CheckpointFile
from clients.cli.changes.watch_lines import CollectionNames, Render, renderer
from clients.cli.changes.watch_start import LAST_MAX, Newest, parse_start
from clients.cli.dcpctl import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PARTIAL,
    Target,
    help_text,
    with_target,
)
from clients.cli.output import VALUE_STYLES, ValueStyle
from clients.cli.partitions.vb_option import with_vbs
from clients.consumer.consumer import Consumer
from clients.consumer.options import Start
from clients.event import Deletion, Event, Mutation, Rollback, StreamFailed, SystemEvent
from clients.kv.sync_client import SyncKv

SAVE_INTERVAL_S: Final = 1.0
CUT_PART_EVENTS: Final = 100_000
"""A cut of more events is printed in parts, so it need not be in memory."""

_CHANGES: Final = (Mutation, Deletion)
_ALWAYS: Final = (Mutation, Deletion, Rollback, StreamFailed)
_OF_COLLECTIONS: Final = (*_ALWAYS, SystemEvent)


@click.command(
    "watch",
    help=help_text(
        "Stream changes of all partitions, or of some. If the server's history branched, a rollback"
        " line says which seqno of the partition to go back to: changes above it are undone.",
        "dcpctl watch",
        "dcpctl watch --from now -o json",
        "dcpctl watch --from 10m --prefix user:",
        "dcpctl watch --last 20 --until-now",
        "dcpctl watch --collection shop.orders",
        "dcpctl watch --state changes.ckpt -o json >> changes.ndjson",
        "dcpctl watch --until-now --vb 17",
        "dcpctl watch --cuts -o json",
    ),
)
@with_vbs
@click.option(
    "--from", "start", default="beginning", show_default=True, metavar="WHERE",
    help="Where to begin partitions that are not in --state: beginning, now, a time"
    " (2026-05-01T12:00:00Z), an age (10m, 2h, 1d), a seqno with one --vb, seqnos as JSON"
    ' ({"17": 5}), or a file with seqnos.',
)  # fmt: skip
@click.option(
    "--last", type=click.IntRange(1, LAST_MAX), metavar="N",
    help="Begin with the newest N changes, in the order of their times. A document counts once.",
)  # fmt: skip
@click.option(
    "--state", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Resume from this file, and save positions there.",
)  # fmt: skip
@click.option("--until-now", is_flag=True, help="Stop after the changes that exist now.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N changes.")
@click.option(
    "--prefix", default="", metavar="TEXT", help="Only keys with this prefix. The server filters."
)
@click.option(
    "--collection", "collections", multiple=True, metavar="SCOPE.COLLECTION",
    help="Only this collection; may be repeated. `all` is every collection.",
)  # fmt: skip
@click.option(
    "--value", "style", type=click.Choice(VALUE_STYLES), default="json", show_default=True,
    help="Values in -o json: objects and arrays as JSON, all as text, or all as base64.",
)  # fmt: skip
@click.option(
    "--from-replicas", is_flag=True,
    help="Read from copies that are not masters. It shows the same, a moment later.",
)  # fmt: skip
@click.option(
    "--cuts", is_flag=True,
    help="A line after each consistent cut: the changes up to it are the server's state as of one"
    " moment, in all partitions. With --until-now: up to the first one. Not in clusters.",
)  # fmt: skip
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
    start: str,
    last: int | None,
    state: Path | None,
    until_now: bool,
    count: int | None,
    prefix: str,
    collections: tuple[str, ...],
    style: ValueStyle,
    from_replicas: bool,
    cuts: bool,
    show_all: bool,
    rollback_to: str,
) -> int:
    """Stream changes, resumable."""
    if last is not None and (start != "beginning" or state is not None):
        raise click.UsageError(
            "--last cannot be used with --from or --state: it says itself where to begin"
        )
    if cuts and (last is not None or count is not None or from_replicas):
        raise click.UsageError("--cuts cannot be used with --last, --count or --from-replicas")
    begins = parse_start(start, vb_ids, lambda: datetime.now(UTC))
    names = _names_of(target, collections)

    def consumer(begins: Start, **more: Any) -> Consumer:
        return Consumer(
            target.address,
            vbuckets=vb_ids or None,
            start=begins,
            on_rollback="restart" if rollback_to == "beginning" else "undo",
            collections="all" if "all" in collections else collections or None,
            key_prefixes=[prefix.encode(errors="surrogateescape")] if prefix else (),
            connect_timeout_s=target.timeout_s,
            from_replicas=from_replicas,
            **more,
        )

    watcher = _Watcher(
        renderer(target.output_or("plain"), style, names),
        names,
        count=count,
        kinds=None if show_all else _OF_COLLECTIONS if collections else _ALWAYS,
        is_saving=state is not None,
    )

    async def work() -> None:
        nonlocal begins
        if last is not None:
            begins = _last_seqnos(target, last, is_filtered=bool(prefix or collections))
            begins = await watcher.show_newest(consumer(begins, until_now=True), last)
        if last is None or not (until_now or watcher.is_enough):
            store = CheckpointFile(state) if state is not None else None
            if cuts:
                source = consumer(begins, store=store, cuts=True)
                await watcher.watch_cuts(source, is_one=until_now)
            else:
                await watcher.watch(consumer(begins, store=store, until_now=until_now))

    return asyncio.run(watcher.run(work, is_finite=until_now or count is not None))


def _names_of(target: Target, collections: tuple[str, ...]) -> CollectionNames | None:
    """Return the names of the server's collections; None if only the default one is followed."""
    if not collections:
        return None
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        return CollectionNames(kv.collections_manifest())


def _last_seqnos(target: Target, last: int, *, is_filtered: bool) -> Start:
    """Return where the newest changes can be. With a filter that is not known."""
    if is_filtered:
        return "beginning"
    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        return {vb: max(0, seqno - last) for vb, seqno in kv.get_all_vb_seqnos().items()}


class _Watcher:
    """Prints events and saves positions. A saved position covers only printed events."""

    def __init__(
        self,
        render: Render,
        names: CollectionNames | None,
        *,
        count: int | None,
        kinds: tuple[type, ...] | None,
        is_saving: bool,
    ) -> None:
        self._render = render
        self._names = names
        self.is_enough = False
        """Whether --count is reached."""
        self._left = count
        self._kinds = kinds
        self._is_saving = is_saving
        self._signal: signal.Signals | None = None
        self._has_failed = False

    async def run(self, work: Callable[[], Coroutine[Any, Any, None]], *, is_finite: bool) -> int:
        """Work until the end or a signal; return the exit code."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work())

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

    async def show_newest(self, consumer: Consumer, size: int) -> Start:
        """Print the newest changes; return where they end."""
        newest = Newest(size)
        async with consumer:
            async for events in consumer.batches():
                newest.take(events)
                self._print([event for event in events if isinstance(event, StreamFailed)])
            self._print(newest.in_order())
            return dict(consumer.checkpoint())

    async def watch(self, consumer: Consumer) -> None:
        """Print until the stream ends or --count is reached."""
        async with consumer:
            saver = asyncio.create_task(self._save_regularly(consumer))
            try:
                async for events in consumer.batches():
                    printed = self._print(events)
                    if self.is_enough:
                        consumer.handed_out(printed)
                        return
            finally:
                saver.cancel()
                await asyncio.gather(saver, return_exceptions=True)
                if self._is_saving:
                    await consumer.save()

    async def watch_cuts(self, consumer: Consumer, *, is_one: bool) -> None:
        """Print cut by cut; `is_one`: only the first."""
        async with consumer:
            async for cut in consumer.cuts(CUT_PART_EVENTS):
                self._print(cut.events)
                if cut.time and (is_one or cut.changes):
                    sys.stdout.buffer.write(self._render(cut))
                    sys.stdout.buffer.flush()
                if self._is_saving:
                    await consumer.save()
                if cut.time and is_one:
                    return

    async def _save_regularly(self, consumer: Consumer) -> None:
        while self._is_saving:
            await asyncio.sleep(SAVE_INTERVAL_S)
            await consumer.save()

    def _print(self, events: Sequence[Event]) -> int:
        """Print events up to --count; return how many were looked at."""
        render, kinds = self._render, self._kinds
        lines = []
        looked_at = 0
        for event in events:
            if self.is_enough:
                break
            looked_at += 1
            if self._names is not None and isinstance(event, SystemEvent):
                self._names.learn(event)
            if kinds is not None and not isinstance(event, kinds):
                continue
            if isinstance(event, StreamFailed):
                self._has_failed = True
                click.echo(f"dcpctl: {event.what}\n  try: {event.hint}", err=True)
            if isinstance(event, _CHANGES) and self._left is not None:
                self._left -= 1
                self.is_enough = not self._left
            lines.append(render(event))
        sys.stdout.buffer.write(b"".join(lines))
        sys.stdout.buffer.flush()
        return looked_at
