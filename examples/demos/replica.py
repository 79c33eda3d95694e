"""A consumer that copies a dcpd server's documents to one SQLite file and follows every change.

    python examples/demos/replica.py 127.0.0.1:11210 replica.sqlite              # follow for ever
    python examples/demos/replica.py 127.0.0.1:11210 replica.sqlite --until-now  # or catch up

The file has the changes and the checkpoint. Both are written in one transaction. So the program may
be killed at any moment: the next run continues after the last transaction, and no change is lost or
applied twice.

It keeps every version of a document, by partition and seqno. So a rollback is one DELETE of all
versions above the seqno that the server names. (A replica that runs for years would drop versions
that no rollback can bring back.)
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dcpd import (
    Checkpoint,
    Consumer,
    DcpdError,
    Deletion,
    Event,
    Mutation,
    Rollback,
    StreamFailed,
    decode_checkpoint,
    encode_checkpoint,
)

COMMIT_INTERVAL_S = 0.2
SCHEMA = """
CREATE TABLE IF NOT EXISTS change (
    vb_id INTEGER, seqno INTEGER, key BLOB, value BLOB,  -- value: NULL where it was deleted
    PRIMARY KEY (vb_id, seqno)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollback (
    number INTEGER PRIMARY KEY, vb_id INTEGER, from_seqno INTEGER, to_seqno INTEGER,
    server_seqno INTEGER, undone INTEGER, reason TEXT
);
CREATE TABLE IF NOT EXISTS checkpoint (
    id INTEGER PRIMARY KEY CHECK (id = 1), positions BLOB, changes_seen INTEGER
);
"""
INSERT_CHANGE = "INSERT INTO change VALUES (?, ?, ?, ?)"
DELETE_CHANGES = "DELETE FROM change WHERE vb_id = ? AND seqno > ?"
INSERT_ROLLBACK = "INSERT INTO rollback VALUES (NULL, ?, ?, ?, ?, ?, ?)"
REPLACE_CHECKPOINT = "REPLACE INTO checkpoint VALUES (1, ?, ?)"
SELECT_ROLLBACKS = "SELECT vb_id, from_seqno, to_seqno, server_seqno, undone, reason FROM rollback"


class Undone(NamedTuple):
    """A rollback: the event, and the number of undone changes."""

    vb_id: int
    from_seqno: int
    to_seqno: int
    server_seqno: int
    undone: int
    reason: str


class Replica:
    """The file. `apply` adds changes, and the next `commit` makes them durable."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=30)
        self._db.execute("PRAGMA journal_mode = WAL")  # others can read while we write
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA cache_size = -65536")  # KiB
        self._db.executescript(SCHEMA)
        self._changes_seen = self.changes_seen()

    def close(self) -> None:
        """Close the file. Uncommitted changes are lost, as after a crash."""
        self._db.close()

    def apply(self, events: Sequence[Event]) -> None:
        """Apply events of the stream, in order."""
        rows: list[tuple[int, int, bytes, bytes | None]] = []
        for event in events:
            match event:
                case Mutation():
                    rows.append((event.vb_id, event.seqno, event.key, event.value))
                case Deletion():
                    rows.append((event.vb_id, event.seqno, event.key, None))
                case Rollback():
                    self._insert(rows)
                    self._roll_back(event)
                case StreamFailed():
                    raise SystemExit(f"partition {event.vb_id}: {event.what}. {event.hint}")
                case _:
                    pass  # stream and snapshot boundaries change no document
        self._insert(rows)

    def commit(self, checkpoint: Checkpoint) -> None:
        """Make the applied changes durable, together with the position in the stream."""
        self._db.execute(REPLACE_CHECKPOINT, (encode_checkpoint(checkpoint), self._changes_seen))
        self._db.commit()

    def checkpoint(self) -> Checkpoint:
        """Return the file's position in the stream, by partition."""
        row = self._db.execute("SELECT positions FROM checkpoint").fetchone()
        return decode_checkpoint(row[0]) if row else {}

    def changes_seen(self) -> int:
        """Return the number of changes since the file was created."""
        row = self._db.execute("SELECT changes_seen FROM checkpoint").fetchone()
        return int(row[0]) if row else 0

    def rollbacks(self) -> list[Undone]:
        """Return the rollbacks, oldest first."""
        return [Undone(*row) for row in self._db.execute(SELECT_ROLLBACKS)]

    def documents(self) -> dict[bytes, bytes]:
        """Return every document by key: its newest version, unless that is a deletion."""
        ordered = self._db.execute("SELECT key, value FROM change ORDER BY vb_id, seqno")
        newest: dict[bytes, bytes | None] = dict(ordered)
        return {key: value for key, value in newest.items() if value is not None}

    def _insert(self, rows: list[tuple[int, int, bytes, bytes | None]]) -> None:
        self._db.executemany(INSERT_CHANGE, rows)
        self._changes_seen += len(rows)
        rows.clear()

    def _roll_back(self, event: Rollback) -> None:
        rows = self._db.execute(DELETE_CHANGES, (event.vb_id, event.to_seqno)).rowcount
        undone = Undone(
            event.vb_id, event.from_seqno, event.to_seqno, event.server_seqno, rows, event.reason
        )
        self._db.execute(INSERT_ROLLBACK, undone)


async def follow(server: str, replica: Replica, *, until_now: bool) -> None:
    """Apply the stream to the replica: without end, or up to the server's present state."""
    consumer = Consumer(
        server,
        name="replica",
        start=replica.checkpoint(),  # partitions without a position start from the beginning
        until_now=until_now,
        validate=True,  # check the stream against the rules of the protocol
        give_up_after_s=30,
    )
    async with consumer:
        committing = asyncio.create_task(commit_regularly(replica, consumer))
        try:
            async for events in consumer.batches():
                replica.apply(events)
                if committing.done():
                    committing.result()  # raises the error that ended it
        finally:
            committing.cancel()
        replica.commit(consumer.checkpoint())


async def commit_regularly(replica: Replica, consumer: Consumer) -> None:
    """Commit a few times a second. This runs between batches, so no batch is half applied."""
    while True:
        await asyncio.sleep(COMMIT_INTERVAL_S)
        replica.commit(consumer.checkpoint())


def main() -> int:
    """Run the program; return its exit code."""
    parser = argparse.ArgumentParser(description="Keep a copy of a dcpd server in a SQLite file.")
    parser.add_argument("server", help="HOST:PORT, or dcpd://USER:PASSWORD@HOST:PORT")
    parser.add_argument("file", type=Path, help="the SQLite file; created if missing")
    parser.add_argument("--until-now", action="store_true", help="stop when caught up")
    options = parser.parse_args()
    replica = Replica(options.file)
    try:
        asyncio.run(follow(options.server, replica, until_now=options.until_now))
    except DcpdError as error:
        print(f"replica: {error}. {error.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        replica.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
