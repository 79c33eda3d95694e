"""What a server says, for comparing: its documents, and the history of their partitions."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from clients.address import parse_address
from clients.consumer.consumer import Consumer
from clients.event import Deletion, Mutation
from clients.spark import read_table
from clients.spark.survey import Survey
from clients.testing import DcpServer


class Row(NamedTuple):
    """A change, or a document: what has to agree."""

    vb: int
    seqno: int
    key: bytes
    op: str
    value: bytes | None
    cas: int
    revision: int


def server_history(server: DcpServer, *, history: bool = True) -> dict[tuple[int, int], Row]:
    """Return all changes that the server has, by partition and seqno."""
    return asyncio.run(_history(server, history))


async def _history(server: DcpServer, history: bool) -> dict[tuple[int, int], Row]:
    rows: dict[tuple[int, int], Row] = {}
    async with Consumer(server.address, until_now=True, history=history) as consumer:
        async for event in consumer:
            if isinstance(event, Mutation):
                row = Row(event.vb_id, event.seqno, event.key, "set", event.value, event.cas,
                          event.rev_seqno)  # fmt: skip
            elif isinstance(event, Deletion):
                op = "expire" if event.is_expiry else "delete"
                row = Row(event.vb_id, event.seqno, event.key, op, None, event.cas, event.rev_seqno)
            else:
                continue
            rows[row.vb, row.seqno] = row
    return rows


def documents_of(history: dict[tuple[int, int], Row]) -> dict[bytes, Row]:
    """Return the documents that a history leaves."""
    documents: dict[bytes, Row] = {}
    for row in sorted(history.values()):
        documents.pop(row.key, None)
        if row.op == "set":
            documents[row.key] = row
    return documents


def rows_of(frame) -> list[Row]:
    """Return a DataFrame's rows; `current` has no op, there all are sets."""
    has_op = "op" in frame.columns
    return [
        Row(row["vb"], row["seqno"], bytes(row["key"]), row["op"] if has_op else "set",
            None if row["value"] is None else bytes(row["value"]), row["cas"], row["revision"])
        for row in frame.collect()
    ]  # fmt: skip


def table_differences(spark, server, path: str, *, kind: str, history: bool = True) -> list[str]:
    """Return in words where a table differs from the server; [] if it is equal."""
    theirs = server_history(server)
    found = []
    current = rows_of(read_table(spark, path, format=kind))
    ours = {row.key: row for row in current}
    if len(ours) != len(current):
        found.append(f"current has {len(current)} rows for {len(ours)} keys")
    wanted = documents_of(theirs)
    found += [
        f"{key!r}: the table has {ours.get(key)}, the server {wanted.get(key)}"
        for key in sorted(ours.keys() | wanted.keys())
        if ours.get(key) != wanted.get(key)
    ]
    if history:
        logged = rows_of(read_table(spark, path, "changes", format=kind))
        log = {(row.vb, row.seqno): row for row in logged}
        floors = floors_of(server)
        if len(log) != len(logged):
            found.append(f"the log has {len(logged)} rows for {len(log)} changes")
        found += [
            f"{place}: the log has {log.get(place)}, the server {theirs.get(place)}"
            for place in sorted(log.keys() | theirs.keys())
            if log.get(place) != theirs.get(place)
            # Below the floor the server shows only what was not replaced there.
            and (place in theirs or place[1] > floors[place[0]])
        ]
    return found


def floors_of(server: DcpServer) -> dict[int, int]:
    """Return from where on each partition tells every version."""
    survey = Survey((parse_address(server.address),), range(1024))
    try:
        return {fact.vb_id: fact.history_floor for fact in survey.facts()}
    finally:
        survey.close()
