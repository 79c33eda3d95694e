"""Leaves changes out on the client's side, with the same result as a server's filter. Pure.

Three uses: key prefixes, if the server does not filter by them (it refused x_key_prefix); the
checkpoints that consumers keep in the server itself; and changes before the start time, if the
server could not say its seqno.

Invariant: a change that is left out at the end of a snapshot becomes a SeqnoAdvanced, as servers do
it, so the snapshot still reaches its end.
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

    Keys are logical ones. `hidden` concerns the default collection alone. `older_than`: by
    partition the CAS below which a change is left out.
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
