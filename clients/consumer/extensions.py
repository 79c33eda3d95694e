"""The extensions that a consumer asks for, and which of them the server granted. Pure.

    x_version_log     a stream request may list all known versions, so one rollback is enough
    x_snapshot_end    a message at the end of each snapshot
    change_streams    every version of a document, not only the newest (option `history`)
    x_previous_value  the value that a change replaced (option `previous_values`)
    x_from_replicas   replicas serve the connection, too (option `from_replicas`)
    x_key_prefix      only keys with a prefix (option `key_prefixes`); else the client filters. It
                      does so, too, if there are more prefixes than a request may list

Each is one DCP_CONTROL. A server without the extension answers EINVAL or NOT_SUPPORTED, and the
connection works without it.

Rules: docs/streams.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from clients.consumer.options import ConsumerOptions
from clients.event import Deletion, Event, Mutation, SeqnoAdvanced, SnapshotEnd
from clients.position import Position
from clients.streaming.stream_connection import FROM_REPLICAS, VERSION_LOG

SNAPSHOT_END: Final = b"x_snapshot_end"
CHANGE_STREAMS: Final = b"change_streams"
PREVIOUS_VALUE: Final = b"x_previous_value"
KEY_PREFIX: Final = b"x_key_prefix"

KEY_PREFIXES_MAX: Final = 64
"""Most prefixes that the server takes in one request (docs/streams.md)."""
_NOT_ASKED_FOR: Final = -1
"""Stands for the status of a control that was not sent."""

DEFAULT_ONLY: Final = (0,)
"""Collection ids by default. An empty tuple means all collections."""


class Extensions:
    """The extensions of one connection: those asked for, and those that the server granted."""

    def __init__(
        self,
        options: ConsumerOptions,
        *,
        has_collections: bool,
        collections: tuple[int, ...] = DEFAULT_ONLY,
    ) -> None:
        self.filter = options.filter
        self.key_prefixes = options.prefixes
        self.collections = collections
        self._filter: dict[str, object] = {}
        if has_collections and collections:
            self._filter["collections"] = [f"{collection_id:x}" for collection_id in collections]
        self._status: dict[bytes, int | None] = {VERSION_LOG: None, SNAPSHOT_END: None}
        if options.history:
            self._status[CHANGE_STREAMS] = None
        self.from_replicas = options.from_replicas
        if options.from_replicas:
            self._status[FROM_REPLICAS] = None
        if options.previous_values:
            self._status[PREVIOUS_VALUE] = None
        if 0 < len(self.key_prefixes) <= KEY_PREFIXES_MAX:
            self._status[KEY_PREFIX] = None
        self.leaves_out_here = self._has_own_filter()
        """The client must filter by key prefix, because the server does not."""

    def controls(self) -> list[bytes]:
        """Return the controls to send; each takes the value "true"."""
        return list(self._status)

    def answered(self, key: bytes, status: int) -> None:
        """Process the server's answer to a control. Other controls are ignored."""
        if key in self._status:
            self._status[key] = status
        self.leaves_out_here = self._has_own_filter()

    def _has_own_filter(self) -> bool:
        return bool(self.key_prefixes) and bool(self._status.get(KEY_PREFIX, _NOT_ASKED_FOR))

    @property
    def has_version_lists(self) -> bool:
        """Whether the server accepts a list of versions."""
        return self._status[VERSION_LOG] == 0

    def is_for(self, position: Position) -> bool:
        """Whether a position belongs to the followed collections, as far as is known."""
        if position.collections is None or not position.seqno:
            return True
        return set(position.collections) == set(self.collections)

    def must_wait(self, position: Position) -> bool:
        """Whether a request needs an extension that the server has not answered yet."""
        if self._status.get(KEY_PREFIX, 0) is None:
            return True
        is_known = self._status[VERSION_LOG] is not None
        return not is_known and position.seqno > 0 and len(position.versions) > 1

    def request_document(self) -> dict[str, object]:
        """Return the JSON members of a stream request, without the list of versions."""
        document = dict(self._filter)
        if self._status.get(KEY_PREFIX, _NOT_ASKED_FOR) == 0:
            document["key_prefixes"] = [prefix.hex() for prefix in self.key_prefixes]
        return document


def left_in(
    events: Sequence[Event],
    prefixes: tuple[bytes, ...],
    hidden: tuple[bytes, ...] = (),
    older_than: Mapping[int, int] = MappingProxyType({}),
) -> list[Event]:
    """Return the events of keys that begin with one of `prefixes` (() = all) and none of `hidden`.

    It has three uses: key prefixes, if the server refused x_key_prefix; hiding the checkpoints that
    consumers store in the server itself; and dropping changes before the start time, if the server
    could not look up its seqno. If the last change of a snapshot is dropped, a SeqnoAdvanced
    replaces it, as in a server's filter. So the snapshot still reaches its end.

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


class Closed:
    """What CLOSED_TIME told: a cut, and the partitions that have reached it."""

    __slots__ = ("is_whole", "round", "time", "vb_ids")

    def __init__(self, time: int, round_: int, vb_ids: Iterable[int], *, is_whole: bool) -> None:
        self.time = time
        self.round = round_
        """In a cluster: what nodes tell is one cut if time and round are the same."""
        self.vb_ids = set(vb_ids)
        self.is_whole = is_whole
        """Whether these are all partitions that the connection follows."""

    def forget(self, vb_ids: frozenset[int]) -> None:
        """Take note that events of partitions were dropped, so that these have not reached it."""
        self.is_whole = self.is_whole and not self.vb_ids & vb_ids
        self.vb_ids -= vb_ids
