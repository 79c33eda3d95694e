"""A year of flights out of New York, written to a server that is killed, while a replica follows.

    scripts/demo                         # installs the dependencies, then runs this
    python examples/demos/flights.py --rows 20000 --csv FILE.csv.zip --keep

What happens, with real processes only
1. `dcpd` starts on free ports with an empty data folder; replica.py follows its stream;
2. the flights are written in the order of their scheduled departure (UTC, to the minute; flights
   of the same minute in the order of the file): one JSON document per aircraft under its tail
   number, so later flights update earlier ones. A flight without a tail number has its own key:
   departure, carrier, flight number and origin;
3. dcpd is killed with SIGKILL in the middle of a batch and started again. The writer repeats what
   was not acknowledged; the replica reconnects by itself and resumes;
4. the replica is killed, misses many flights, and resumes from its checkpoint;
5. some partitions get a history branch: they go back to an earlier seqno, as after a failover to a
   copy that was behind. The replica gets ROLLBACK, undoes its changes above it, and continues;
6. the documents of the replica, of the server, and what the writer knows are compared key by key.

The exit code is 0 only if all are equal. Otherwise every difference is explained.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from flight_data import DataError, Flight, packaged_csv, read_flights
from processes import ProcessFailedError, ReplicaProcess, ServerProcess
from replica import Undone
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from writer import WriteFailedError, Writer

from dcpd import Consumer, DcpdError, KvClient, Mutation, vbucket_of

BRANCHES = 12
"""Partitions that get a history branch."""
POLL_S = 0.1
FROZEN_S = 0.05
"""How long dcpd stands still before its crash: a batch is sent, and gets no more answers."""
PATIENCE_S = 60.0
"""How long to wait for something that takes a second or two."""
DIFFERENCES_SHOWN = 20
ROLLBACKS_SHOWN = 4


class DemoError(Exception):
    """The demo cannot continue. The text says why."""


FAILURES = (DataError, WriteFailedError, ProcessFailedError, DemoError, DcpdError)


class Summary(NamedTuple):
    """The summary that is printed at the end."""

    writes: int
    repeated: int
    documents: int
    changes_seen: int
    rollbacks: int
    undone: int
    problems: list[str]
    load_s: float


# -- the story -------------------------------------------------------------------------------------


class Cast(NamedTuple):
    """The processes and helpers of the demo."""

    server: ServerProcess
    replica: ReplicaProcess
    kv: KvClient
    writer: Writer
    progress: Progress


async def run_demo(flights: list[Flight], folder: Path, progress: Progress) -> Summary:
    """Run the steps of the module's docstring. Return the summary."""
    server = ServerProcess(folder / "data")
    replica = ReplicaProcess(folder / "replica.sqlite")
    try:
        await asyncio.to_thread(server.start)
        say(progress, f"dcpd listens on {server.address}")
        replica.start(server.address)
        async with KvClient.connect(server.address) as kv:
            writer = Writer(kv, batch_rows=min(max(len(flights) // 100, 1000), 4000))
            cast = Cast(server, replica, kv, writer, progress)
            watching = asyncio.create_task(show_progress(cast, len(flights)))
            try:
                await play(flights, cast)
                say(progress, "comparing replica, server and writer, key by key")
                problems = await differences(cast)
            finally:
                watching.cancel()
        rollbacks = replica.file.rollbacks()
        return Summary(
            writer.writes, writer.repeated, len(writer.expected), replica.file.changes_seen(),
            len(rollbacks), sum(rollback.undone for rollback in rollbacks), problems, writer.load_s,
        )  # fmt: skip
    finally:
        replica.close()
        server.stop()


async def play(flights: list[Flight], cast: Cast) -> None:
    """Write all flights, with the crashes and the branch on the way."""
    server, replica, kv, writer, progress = cast
    first, second, third, fourth, last = parts(flights, (0.3, 0.45, 0.6, 0.75))
    await replica_caught_up(cast)
    say(progress, "the replica follows, in a process of its own")
    await writer.write(first)

    say(progress, "dcpd: SIGKILL in the middle of a batch")
    await asyncio.gather(writer.write(second), crash(server, writer))
    say(progress, f"dcpd is back; {writer.repeated:,} writes without an answer were sent again")

    replica.kill()
    seen = replica.file.changes_seen()
    say(progress, f"replica: SIGKILL; its checkpoint stands at {seen:,} changes")
    await writer.write(third)
    replica.start(server.address)
    say(progress, f"the replica resumes there; {len(third):,} flights were written meanwhile")

    then, expected_then = await kv.get_all_vb_seqnos(), dict(writer.expected)
    await writer.write(fourth)
    await replica_caught_up(cast)
    branched = await branch(server, then, await kv.get_all_vb_seqnos())
    for key in [key for key in writer.expected if vbucket_of(key) in branched]:
        del writer.expected[key]
    writer.expected.update((k, v) for k, v in expected_then.items() if vbucket_of(k) in branched)
    undone = sum(branched.values())
    say(progress, f"history branch on {len(branched)} partitions: {undone:,} writes are undone")
    await asyncio.gather(writer.write(last), show_rollbacks(cast, set(branched)))

    replica.kill()
    await asyncio.to_thread(replica.catch_up, server.address)


def parts(flights: list[Flight], cuts: Sequence[float]) -> list[list[Flight]]:
    """Cut the flights at these shares of the whole."""
    at = [0, *(int(len(flights) * cut) for cut in cuts), len(flights)]
    return [flights[start:stop] for start, stop in pairwise(at)]


async def crash(server: ServerProcess, writer: Writer) -> None:
    """Kill the server while the writer's next batch is under way, and start it again."""
    writer.batch_sent.clear()
    await writer.batch_sent.wait()
    server.freeze()
    await asyncio.sleep(FROZEN_S)
    server.kill()
    await asyncio.to_thread(server.start)


async def branch(
    server: ServerProcess, then: Mapping[int, int], now: Mapping[int, int]
) -> dict[int, int]:
    """Take the partitions that changed most back to `then`. Return how much each lost."""
    busiest = sorted(now, key=lambda vb_id: now[vb_id] - then[vb_id])[-BRANCHES:]
    for vb_id in busiest:
        await asyncio.to_thread(server.branch, vb_id, then[vb_id])
    return {vb_id: now[vb_id] - then[vb_id] for vb_id in busiest}


async def replica_caught_up(cast: Cast) -> None:
    """Return when the replica's checkpoint has everything that the server has now."""
    wanted = await cast.kv.get_all_vb_seqnos()
    deadline = time.monotonic() + PATIENCE_S
    while True:
        cast.replica.check()
        at = cast.replica.file.checkpoint()
        behind = [vb for vb, seqno in wanted.items() if vb not in at or at[vb].seqno < seqno]
        if not behind:
            return
        if time.monotonic() > deadline:
            raise DemoError(f"the replica is behind on {len(behind)} partitions: {behind[:10]}")
        await asyncio.sleep(POLL_S)


async def show_rollbacks(cast: Cast, awaited: set[int]) -> None:
    """Report rollbacks as the replica gets them. Return when it has got all of them."""
    told = 0
    deadline = time.monotonic() + PATIENCE_S
    while awaited:
        cast.replica.check()
        for rollback in cast.replica.file.rollbacks()[told:]:
            told += 1
            awaited.discard(rollback.vb_id)
            if told <= ROLLBACKS_SHOWN:
                say(cast.progress, rollback_text(rollback))
        if awaited and time.monotonic() > deadline:
            raise DemoError(f"branched, but the replica saw no ROLLBACK: {sorted(awaited)}")
        await asyncio.sleep(POLL_S)
    say(cast.progress, f"and {told - ROLLBACKS_SHOWN} more; the replica streams on")


def rollback_text(rollback: Undone) -> str:
    """Return what a rollback undid, and why it went back to that seqno."""
    return (
        f"ROLLBACK of partition {rollback.vb_id} to seqno {rollback.server_seqno}: the replica goes"
        f" from {rollback.from_seqno} to {rollback.to_seqno}, its newest complete state, and"
        f" undoes {rollback.undone} changes"
    )


# -- comparing -------------------------------------------------------------------------------------


async def differences(cast: Cast) -> list[str]:
    """Compare replica, server and writer. Return the differences in words."""
    held, written = replica_documents(cast.replica), cast.writer.expected
    streamed: dict[bytes, bytes] = {}
    async with Consumer(cast.server.address, until_now=True, validate=True) as consumer:
        async for events in consumer.batches():
            streamed.update((e.key, e.value) for e in events if isinstance(e, Mutation))
    # GETs cannot find a key that nobody knows. So also compare a stream from the beginning.
    keys = held.keys() | written.keys() | streamed.keys()
    stored = {key: found.value for key, found in (await cast.kv.get_many(keys)).items()}
    return [
        *compare("the replica", held, stored),
        *compare("a stream from the beginning", streamed, stored),
        *compare("the writer", written, stored),
    ]


def replica_documents(replica: ReplicaProcess) -> dict[bytes, bytes]:
    """Return what the replica holds, by key."""
    return replica.file.documents()


def compare(name: str, ours: Mapping[bytes, bytes], server: Mapping[bytes, bytes]) -> list[str]:
    """Return in words how `ours` differs from the server's documents."""
    return [
        f"{key.decode()}: {name} has {show(ours.get(key))}, the server {show(server.get(key))}"
        for key in sorted(ours.keys() | server.keys())
        if ours.get(key) != server.get(key)
    ]


def show(document: bytes | None) -> str:
    """Return a document as a difference names it."""
    if document is None:
        return "nothing"
    try:
        flight = json.loads(document)
        return f"{flight['carrier']}{flight['flight']} of {flight['time_hour']}"
    except (ValueError, TypeError, KeyError):
        return repr(document[:60])


# -- what one sees ---------------------------------------------------------------------------------


def say(progress: Progress, text: str) -> None:
    """Print a step above the progress bar."""
    progress.console.print(f"  {text}", soft_wrap=True)


async def show_progress(cast: Cast, total: int) -> None:
    """Update the progress bar."""
    task = cast.progress.add_task("flights", total=total, seen=0)
    while True:
        seen = cast.replica.file.changes_seen()
        cast.progress.update(task, completed=cast.writer.writes, seen=seen)
        await asyncio.sleep(POLL_S)


def summary_text(summary: Summary, time_s: float) -> str:
    """Return the summary as it is printed."""
    count = len(summary.problems)
    rows = (
        ("writes", f"{summary.writes:,} acknowledged, {summary.repeated:,} of them sent again"),
        ("documents", f"{summary.documents:,}"),
        (
            "changes seen",
            f"{summary.changes_seen:,} by the replica (newer ones replace older ones)",
        ),
        ("rollbacks", f"{summary.rollbacks:,} seen, {summary.undone:,} changes undone"),
        ("differences", f"{count:,}"),
        ("time", f"{time_s:.1f} s"),
        ("rate", f"{summary.writes / summary.load_s:,.0f} writes/s, the server's crash included"),
    )
    problems = [f"  {problem}" for problem in summary.problems[:DIFFERENCES_SHOWN]]
    if count > DIFFERENCES_SHOWN:
        problems.append(f"  and {count - DIFFERENCES_SHOWN:,} more")
    title = "flights: NOT equal" if count else "flights: all equal"
    return "\n".join((title, *(f"  {k:<14}{v}" for k, v in rows), *problems))


async def until_sigterm(work: Coroutine[Any, Any, Summary]) -> Summary:
    """Do the work. SIGTERM cancels it, so that it ends what it has started, and then the program.
    An exception out of a signal's handler could come anywhere in the loop.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await work
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code: 0 only if all is equal."""
    parser = argparse.ArgumentParser(description="Flights, crashes and a rollback, end to end.")
    parser.add_argument("--rows", type=int, help="only the first flights", metavar="N")
    parser.add_argument("--csv", type=Path, help="another file of the same columns, also zipped")
    parser.add_argument("--keep", action="store_true", help="keep the data folder afterwards")
    options = parser.parse_args(arguments)
    columns = (
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("replica: {task.fields[seen]:,} changes"), TimeElapsedColumn(),
    )  # fmt: skip
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="dcpd-demo-"))
    try:
        console = Console(stderr=True, highlight=False)
        with Progress(*columns, console=console, redirect_stdout=False) as progress:
            say(progress, "reading the flights")
            flights = read_flights(options.csv or packaged_csv())[: options.rows]
            summary = asyncio.run(until_sigterm(run_demo(flights, folder, progress)))
    except FAILURES as error:
        print(f"flights: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        if options.keep:
            print(f"flights: data and logs are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder)
    print(summary_text(summary, time.monotonic() - began))
    return 1 if summary.problems else 0


if __name__ == "__main__":
    # Before the loop runs, SIGTERM raises an exception, like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
