"""Compares what the nodes hold with what clients were answered, and with what consumers have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Final

from clients.address import parse_address
from clients.consumer.consumer import Consumer
from clients.event import Deletion, Mutation
from clients.kv.client import KvClient
from clients.link.pipelined_link import Link
from clients.mirror.mirror import Mirror
from dcp.wire.opcode import Opcode
from dcp.wire.status import Status
from tests.soak.cluster.load import Load
from tests.soak.cluster.nodes import FaultyCluster

SHOWN: Final = 5
"""Differences of a kind in a message."""
FOLLOW_S: Final = 300.0
"""Longest time until a replica knows what is committed, or a consumer has it."""
ASKED_AT_ONCE: Final = 500


async def check_contents(
    cluster: FaultyCluster, kv: KvClient, views: Mapping[str, Mirror], load: Load
) -> list[str]:
    """Return every difference, in words. Nobody writes meanwhile."""
    keys = {*load.histories, *load.loaded, *load.maybe}
    stored = {key: found.value for key, found in (await kv.get_many(keys)).items()}
    wrong = list(_against_answers(stored, load))
    for name, view in views.items():
        await view.caught_up(FOLLOW_S)
        wrong += _different(name, dict(view.items()), stored)
    wrong += _different("a consumer from the beginning", await _streamed(kv), stored)
    for name in cluster.nodes:
        held = await _copies(cluster, name, stored)
        wrong += _different(f"node {name}", held, stored)
    return wrong


def _against_answers(stored: Mapping[bytes, bytes], load: Load) -> Iterable[str]:
    """Compare with the keys that were written once. The others have histories."""
    lost = [key for key, value in load.loaded.items() if stored.get(key) != value]
    if lost:
        yield f"{len(lost)} answered writes are lost or other ones: {lost[:SHOWN]}"
    for key, value in load.maybe.items():
        if stored.get(key) not in {None, value}:
            yield f"{key!r} is {stored.get(key)!r}, and nobody wrote that"


def _different(who: str, held: Mapping[bytes, bytes], stored: Mapping[bytes, bytes]) -> list[str]:
    wrong = [key for key in held.keys() | stored.keys() if held.get(key) != stored.get(key)]
    if not wrong:
        return []
    some = [(key, held.get(key), stored.get(key)) for key in sorted(wrong)[:SHOWN]]
    return [f"{who} differs in {len(wrong)} keys (key, here, masters): {some}"]


async def _streamed(kv: KvClient) -> dict[bytes, bytes]:
    """Return what a consumer gets that begins now."""
    documents: dict[bytes, bytes] = {}
    async with Consumer(kv.address, until_now=True, validate=True) as consumer:
        async for events in consumer.batches():
            for event in events:
                if isinstance(event, Mutation):
                    documents[event.key] = event.value
                elif isinstance(event, Deletion):
                    documents.pop(event.key, None)
    return documents


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
