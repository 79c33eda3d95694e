"""Full-text search over all documents: an index in SQLite (FTS5) that follows the server.

    python examples/search_index.py 127.0.0.1:11210 index.db                 follow until Ctrl-C
    python examples/search_index.py 127.0.0.1:11210 index.db --search "fox"  catch up, then search

The index only has the last value of each document. So after a rollback the partition is indexed
again from the beginning (`on_rollback="restart"`), and no journal is needed. Positions are
committed with the index.
"""

import argparse
import asyncio
import contextlib
import sqlite3
import sys
import time
from collections import Counter

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
CREATE VIRTUAL TABLE IF NOT EXISTS texts USING fts5(text);
CREATE TABLE IF NOT EXISTS keys (key BLOB PRIMARY KEY, id INTEGER, vb INTEGER);
CREATE INDEX IF NOT EXISTS keys_by_vb ON keys (vb);
CREATE TABLE IF NOT EXISTS positions (vb INTEGER PRIMARY KEY, position BLOB);
"""


def prepare(db: sqlite3.Connection) -> None:
    """Create the tables. An old index with keys as text, which can collide, is rebuilt."""
    db.executescript(SCHEMA)
    if db.execute("SELECT 1 FROM keys WHERE typeof(key) = 'text' LIMIT 1").fetchone():
        db.executescript(f"DROP TABLE texts; DROP TABLE keys; DROP TABLE positions; {SCHEMA}")


def forget(db: sqlite3.Connection, where: str, what: object) -> None:
    db.execute(f"DELETE FROM texts WHERE rowid IN (SELECT id FROM keys WHERE {where} = ?)", (what,))
    db.execute(f"DELETE FROM keys WHERE {where} = ?", (what,))


def apply(db: sqlite3.Connection, delivery: Delivery) -> None:
    """Index a batch and store its positions, in one transaction."""
    with db:
        for event in delivery.events:
            match event:
                case Mutation():
                    forget(db, "key", event.key)
                    text = event.value.decode(errors="replace")
                    row = db.execute("INSERT INTO texts VALUES (?)", (text,)).lastrowid
                    db.execute("INSERT INTO keys VALUES (?, ?, ?)", (event.key, row, event.vb_id))
                case Deletion():
                    forget(db, "key", event.key)
                case Rollback():
                    forget(db, "vb", event.vb_id)
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


async def main(server: str, path: str, words: str | None) -> None:
    progress = Progress()

    def take(delivery: Delivery) -> None:
        apply(db, delivery)
        progress.count(delivery)

    with contextlib.closing(sqlite3.connect(path)) as db:
        prepare(db)
        rows = db.execute("SELECT vb, position FROM positions")
        start = {vb_id: decode_position(raw) for vb_id, raw in rows}
        until = "until it has caught up" if words else "until Ctrl-C"
        print(f"{path} follows {server} {until}", file=sys.stderr)
        until_now = words is not None
        consumer = Consumer(server, start=start, until_now=until_now, on_rollback="restart")
        async with consumer:
            await consumer.run(take)
        progress.say()
        for key, text in db.execute(
            "SELECT key, snippet(texts, 0, '[', ']', '...', 8)"
            " FROM texts JOIN keys ON id = texts.rowid WHERE texts MATCH ? ORDER BY rank",
            (words,),
        ):
            print(f"{key.decode(errors='replace')}: {text}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("server", metavar="HOST:PORT", help="for example 127.0.0.1:11210")
    parser.add_argument("path", metavar="FILE", help="the index; it is created if there is none")
    parser.add_argument("--search", metavar="WORDS", help="catch up, then print what has them")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(options.server, options.path, options.search))
