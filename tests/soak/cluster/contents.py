"""Compares what the nodes hold with what clients were answered, and with what consumers have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Final

from clients.address import ServerAddress, parse_address
from clients.consumer.consumer import Consumer
from clients.errors import OperationTimeoutError
from clients.event import Deletion, Mutation
from clients.kv.client import KvClient
from clients.link.pipelined_link import Link
from clients.mirror.mirror import Mirror
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from tests.soak.cluster.load import Load
from tests.soak.cluster.nodes import FaultyCluster
from vbucket.model.consumer_documents import OWN_PREFIX

SHOWN: Final = 5
"""Differences of a kind in a message."""
FOLLOW_S: Final = 300.0
"""Longest time until a replica knows what is committed, or a consumer has it."""
ASKED_AT_ONCE: Final = 500


async def check_contents(
    cluster: FaultyCluster, kv: KvClient, views: Mapping[str, Mirror], load: Load
) -> list[str]:
    """Return every difference, in words. Nobody writes meanwhile."""
    stored = await stored_of(kv, load)
    wrong = list(_against_answers(stored, load))
    for name, view in views.items():
        try:
            await view.caught_up(FOLLOW_S)
        except OperationTimeoutError:
            wrong.append(await _behind(name, view, kv))
        wrong += different(name, _of_users(view.items()), stored)
    wrong += different(
        "a consumer from the beginning", await streamed(parse_address(cluster.everywhere())), stored
    )
    for name in cluster.nodes:
        held = await _copies(cluster, name, stored)
        wrong += different(f"node {name}", held, stored)
    return wrong


async def _behind(name: str, view: Mirror, kv: KvClient) -> str:
    """Return in words where a consumer stands still."""
    high, done = await kv.get_all_vb_seqnos(), view.consumer.checkpoint()
    behind = {vb_id: (done[vb_id].seqno if vb_id in done else 0, seqno)
              for vb_id, seqno in high.items()}  # fmt: skip
    behind = {vb_id: place for vb_id, place in behind.items() if place[0] < place[1]}
    nodes = {
        session.link.node: [
            vb for vb, stream in session.core.streams.by_vb.items() if not stream.is_over
        ]
        for session in view.consumer._placement.sessions.values()
    }
    return (
        f"{name} is not caught up after {FOLLOW_S:g} s (partition: where it is, and should be): "
        f"{behind}; streams by node: {nodes}; {view.consumer.metrics.as_dict()}"
    )


async def stored_of(kv: KvClient, load: Load) -> dict[bytes, bytes]:
    """Return what the masters have of all keys that may have been written."""
    keys = {*load.histories, *load.loaded, *load.maybe}
    return {key: found.value for key, found in (await kv.get_many(keys)).items()}


def _of_users(documents: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return documents without the cluster's own, such as the members of a group."""
    return {key: value for key, value in documents if not key.startswith(OWN_PREFIX)}


def _against_answers(stored: Mapping[bytes, bytes], load: Load) -> Iterable[str]:
    """Compare with the keys that were written once. The others have histories."""
    lost = [key for key, value in load.loaded.items() if stored.get(key) != value]
    if lost:
        yield f"{len(lost)} answered writes are lost or other ones: {lost[:SHOWN]}"
    for key, value in load.maybe.items():
        if stored.get(key) not in {None, value}:
            yield f"{key!r} is {stored.get(key)!r}, and nobody wrote that"


def different(who: str, held: Mapping[bytes, bytes], stored: Mapping[bytes, bytes]) -> list[str]:
    """Return in words where documents differ from those of the masters."""
    wrong = [key for key in held.keys() | stored.keys() if held.get(key) != stored.get(key)]
    if not wrong:
        return []
    some = [(key, held.get(key), stored.get(key)) for key in sorted(wrong)[:SHOWN]]
    return [f"{who} differs in {len(wrong)} keys (key, here, masters): {some}"]


async def streamed(address: ServerAddress) -> dict[bytes, bytes]:
    """Return what a consumer gets that begins now."""
    documents: dict[bytes, bytes] = {}
    async with Consumer(address, until_now=True, validate=True) as consumer:
        async for events in consumer.batches():
            for event in events:
                if isinstance(event, Mutation):
                    documents[event.key] = event.value
                elif isinstance(event, Deletion):
                    documents.pop(event.key, None)
    return _of_users(documents.items())


async def _copies(
    cluster: FaultyCluster, name: str, stored: Mapping[bytes, bytes]
) -> dict[bytes, bytes]:
    """Return what a node answers for each key, as master or as replica.

    A replica learns that the last changes are committed with its master's next message.
    """
    link = await Link.connect(parse_address(cluster.address(name)), timeout_s=FOLLOW_S)
    give_up_s = time.monotonic() + FOLLOW_S
    held: dict[bytes, bytes] = {}
    left = list(stored)
    try:
        while left:
            for first in range(0, len(left), ASKED_AT_ONCE):
                held.update(await _asked(cluster, link, left[first : first + ASKED_AT_ONCE]))
            left = [key for key in left if held.get(key) != stored[key]]
            if time.monotonic() > give_up_s:
                break
            if left:
                await asyncio.sleep(0.1)
    finally:
        link.close()
    return held


async def _asked(cluster: FaultyCluster, link: Link, keys: list[bytes]) -> dict[bytes, bytes]:
    requests = [
        link.request(
            opcode, vb_id=cluster.vb_of(key), key=b"\0" + key if link.has_collections else key
        )
        for key in keys
        for opcode in (Opcode.GET, Opcode.GET_REPLICA)
    ]
    frames = await asyncio.gather(*requests)
    held = {}
    for key, found in zip(keys, zip(frames[::2], frames[1::2], strict=True), strict=True):
        for frame in found:
            if frame.status == Status.OK:
                held[key] = frame.value
    return held
