"""Filters changes in the client, with the same result as a server's filter. Pure.

It has three uses: key prefixes, if the server refused x_key_prefix; hiding the checkpoints that
consumers store in the server itself; and dropping changes before the start time, if the server
could not look up its seqno.

Invariant: if the last change of a snapshot is dropped, a SeqnoAdvanced replaces it, as in a
server's filter. So the snapshot still reaches its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from clients.event import Deletion, Event, Mutation, SeqnoAdvanced, SnapshotEnd


def left_in(
    events: Sequence[Event],
    prefixes: tuple[bytes, ...],
    hidden: tuple[bytes, ...] = (),
    older_than: Mapping[int, int] = MappingProxyType({}),
) -> list[Event]:
    """Return the events of keys that begin with one of `prefixes` (() = all) and none of `hidden`.

    Keys are without collection id. `hidden` applies to the default collection only. `older_than`:
    partition -> CAS below which changes are dropped.
    """
    kept: list[Event] = []
    passed: dict[int, int] = {}
    for event in events:
        if isinstance(event, Mutation | Deletion):
            is_wanted = not prefixes or event.key.startswith(prefixes)
            is_hidden = event.collection_id == 0 and event.key.startswith(hidden)
            if not is_wanted or is_hidden or event.cas < older_than.get(event.vb_id, 0):
                passed[event.vb_id] = event.seqno
                continue
        elif isinstance(event, SnapshotEnd) and passed.get(event.vb_id) == event.end_seqno:
            kept.append(SeqnoAdvanced(event.vb_id, event.end_seqno))
        kept.append(event)
    return kept
