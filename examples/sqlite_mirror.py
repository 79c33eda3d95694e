"""All documents in a table of SQLite: positions are committed with the effects of the events.

    python examples/sqlite_mirror.py 127.0.0.1:11210 mirror.db      follow until Ctrl-C
    dcpctl conformance consumer -- python examples/sqlite_mirror.py      try what may happen to it
    sqlite3 mirror.db "SELECT * FROM documents LIMIT 10"

You may kill it at any time: it resumes exactly where it stopped. If history branches it undoes what
the server undid, with a journal of replaced values. (This journal grows without limit.
`dcpd.Mirror` has a bounded one, and starts a partition again if a branch lies deeper.)
"""

import argparse
import asyncio
import contextlib
import json
import os
import sqlite3
import sys
import time
from collections import Counter
from pathlib import Path

from dcpd import (
    Consumer,
    Deletion,
    Delivery,
    Mutation,
    Rollback,
    StreamFailed,
    decode_position,
    encode_position,
)  # fmt: skip

SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (key BLOB PRIMARY KEY, vb INTEGER, value BLOB);
CREATE TABLE IF NOT EXISTS journal (vb INTEGER, seqno INTEGER, key BLOB, before BLOB,
                                    PRIMARY KEY (vb, seqno)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS positions (vb INTEGER PRIMARY KEY, position BLOB);
"""


def put(db: sqlite3.Connection, vb_id: int, key: bytes, value: bytes | None) -> None:
    if value is None:
        db.execute("DELETE FROM documents WHERE key = ?", (key,))
    else:
        db.execute("INSERT OR REPLACE INTO documents VALUES (?, ?, ?)", (key, vb_id, value))


def change(db: sqlite3.Connection, event: Mutation | Deletion, value: bytes | None) -> None:
    before = db.execute("SELECT value FROM documents WHERE key = ?", (event.key,)).fetchone()
    db.execute(
        "INSERT INTO journal VALUES (?, ?, ?, ?)",
        (event.vb_id, event.seqno, event.key, before and before[0]),
    )
    put(db, event.vb_id, event.key, value)


def undo(db: sqlite3.Connection, vb_id: int, to_seqno: int) -> None:
    above = (vb_id, to_seqno)
    undone = "FROM journal WHERE vb = ? AND seqno > ?"
    for key, before in db.execute(f"SELECT key, before {undone} ORDER BY seqno DESC", above):
        put(db, vb_id, key, before)
    db.execute(f"DELETE {undone}", above)


def apply(db: sqlite3.Connection, delivery: Delivery) -> None:
    """Apply a batch and store its positions, in one transaction."""
    with db:
        for event in delivery.events:
            match event:
                case Mutation():
                    change(db, event, event.value)
                case Deletion():
                    change(db, event, None)
                case Rollback():
                    undo(db, event.vb_id, event.to_seqno)
                case StreamFailed():  # the partition would stop silently
                    raise RuntimeError(f"{event.what}; {event.hint}")
        db.executemany(
            "INSERT OR REPLACE INTO positions VALUES (?, ?)",
            [(vb_id, encode_position(place)) for vb_id, place in delivery.positions.items()],
        )


class Progress:
    """Says on stderr what was applied, at most once a second, and at the end."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._said_s = time.monotonic()

    def count(self, delivery: Delivery) -> None:
        self._counts.update(type(event).__name__.lower() for event in delivery.events)
        if time.monotonic() > self._said_s + 1:
            self.say()

    def say(self) -> None:
        self._said_s = time.monotonic()
        kinds = ("mutation", "deletion", "rollback")
        print(*(f"{kind}s: {self._counts[kind]:,} " for kind in kinds), file=sys.stderr)


def show(db: sqlite3.Connection, path: str) -> None:
    """Write all documents to a file, for `dcpctl conformance consumer`."""
    rows = db.execute("SELECT key, value FROM documents")
    documents = {key.decode(): value.decode() for key, value in rows}
    new = Path(f"{path}.new")
    new.write_text(json.dumps(documents))
    new.replace(path)


async def main(server: str, path: str, *, until_now: bool) -> None:
    progress = Progress()

    def take(delivery: Delivery) -> None:
        apply(db, delivery)
        if shown := os.environ.get("DOCUMENTS_FILE"):
            show(db, shown)
        progress.count(delivery)

    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(SCHEMA)
        rows = db.execute("SELECT vb, position FROM positions")
        start = {vb_id: decode_position(raw) for vb_id, raw in rows}
        until = "until it has caught up" if until_now else "until Ctrl-C"
        print(f"{path} follows {server} {until}", file=sys.stderr)
        async with Consumer(server, start=start, until_now=until_now) as consumer:
            await consumer.run(take)
        progress.say()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    env = os.environ
    parser.add_argument("server", metavar="HOST:PORT", help="for example 127.0.0.1:11210",
                        nargs="?" if "PORT" in env else None,
                        default=f"{env.get('HOST')}:{env.get('PORT')}")  # fmt: skip
    parser.add_argument("path", metavar="FILE", help="the mirror; it is created if there is none",
                        nargs="?" if "STATE_DIR" in env else None,
                        default=f"{env.get('STATE_DIR')}/mirror.db")  # fmt: skip
    parser.add_argument("--until-now", action="store_true", help="end when it has caught up")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(options.server, options.path, until_now=options.until_now))
