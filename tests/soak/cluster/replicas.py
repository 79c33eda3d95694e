"""Holds the replicas of a cluster against its masters, document by document.

A KvClient chooses which replica it asks. Here each one has to answer, for thousands of documents:
the requests (GET_REPLICA) are packed and sent on connections of our own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from clients.address import parse_address
from clients.errors import DcpdError
from clients.link.pipelined_link import Link
from clients.operation import get_replica_operation, pack_operations, partitions_of
from dcp.wire.status import Status

ASKED_AT_ONCE = 2_000
ANSWER_S = 30.0
LEARN_S = 30.0
"""How long a replica may take to learn what is committed: its master's next message tells it."""
PAUSE_S = 0.1
Found = dict[bytes, bytes | None]
"""Key -> what a replica answers; None: nothing."""


class Server(Protocol):
    """A node's process."""

    address: str
    """Of its key-value port."""


class Nodes(Protocol):
    """The nodes of a cluster."""

    servers: Mapping[str, Server]
    """By name."""

    def map(self) -> list[dict[str, Any]]:
        """Return the cluster's map, a row for each partition."""


class Compared(NamedTuple):
    """The result."""

    documents: int
    """Documents of replicas that were compared: each counts once for each replica."""
    wrong: dict[str, Found]
    """Node -> where its answers differ from the masters'."""


async def compare_replicas(
    nodes: Nodes, stored: Mapping[bytes, bytes], keys: Iterable[bytes]
) -> Compared:
    """Ask each replica of each key; compare with `stored`, what the masters have. Raises
    DcpdError, DcpdError.
    """
    give_up_s = time.monotonic() + LEARN_S
    left, documents = set(keys), 0
    while True:
        rows = await asyncio.to_thread(nodes.map)
        asked = replicas_of(rows, left)
        documents = documents or sum(map(len, asked.values()))
        differing = await asyncio.gather(
            *(
                _differing(nodes.servers[name].address, asked[name], stored, len(rows))
                for name in asked
            )
        )
        wrong = {name: found for name, found in zip(asked, differing, strict=True) if found}
        left = set().union(*wrong.values())
        if not left or time.monotonic() > give_up_s:
            return Compared(documents, wrong)
        await asyncio.sleep(PAUSE_S)


def replicas_of(rows: Sequence[Mapping[str, Any]], keys: Iterable[bytes]) -> dict[str, list[bytes]]:
    """Return the keys of which each node has a replica. `rows`: the cluster's map."""
    nodes: list[list[str]] = [[] for _ in rows]
    for row in rows:
        nodes[row["vb"]] = [name for name in row["copies"] if name != row["master"]]
    asked: dict[str, list[bytes]] = {}
    ordered = list(keys)
    operations = [get_replica_operation(key) for key in ordered]
    for key, vb_id in zip(ordered, partitions_of(operations, len(rows)), strict=True):
        for name in nodes[vb_id]:
            asked.setdefault(name, []).append(key)
    return asked


async def _differing(
    address: str, keys: list[bytes], stored: Mapping[bytes, bytes], partitions: int
) -> Found:
    """Return where a replica's documents differ from the masters'."""
    link = await Link.connect(parse_address(address), timeout_s=ANSWER_S)
    try:
        wrong: Found = {}
        for first in range(0, len(keys), ASKED_AT_ONCE):
            found = await _answers(link, keys[first : first + ASKED_AT_ONCE], partitions)
            wrong.update((key, value) for key, value in found.items() if value != stored.get(key))
        return wrong
    finally:
        link.close()


async def _answers(link: Link, keys: list[bytes], partitions: int) -> Found:
    operations = [get_replica_operation(key) for key in keys]
    opaque = link.take_opaques(len(keys))
    packets = pack_operations(
        operations, partitions_of(operations, partitions), opaque=opaque,
        has_collections=link.has_collections,
    )  # fmt: skip
    try:
        async with asyncio.timeout(ANSWER_S):
            frames = await link.send_batch(packets, opaque, len(keys))
    except TimeoutError:
        raise DcpdError(
            f"{link.node} did not answer {len(keys)} reads within {ANSWER_S:g} s"
        ) from None
    return {
        key: frame.value if frame.status == Status.OK else None
        for key, frame in zip(keys, frames, strict=True)
    }
