"""What the cluster's cores are told, and what they ask for: events and effects as data.

Each core has `on_event(now_ns, event) -> effects`. The caller carries out the effects on a
`MetaStore` and brings the answers back as events with the same tag. Cores accept answers late,
twice or never: a tag that they no longer wait for is ignored, and each wait has an end of its own.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from failover.metadata.metastore import StoreRequest, StoreResult, WatchMessage

ANSWER_NS_MAX: Final = 1_000_000_000
"""A request without an answer counts as OutcomeUnknown after so long. This is above the deadline of
a store's client, so it matters only if that client stands still."""
RETRY_NS: Final = 100_000_000
"""Pause after a request that the store did not carry out: ten a second for each core."""


class Tag(NamedTuple):
    """Names a request or a watch: the core that made it, and its number there."""

    core: str
    number: int


# ---- Events


class Tick(NamedTuple):
    """Time has passed. Cores need one at least every 100 ms."""


class Answered(NamedTuple):
    """The result of a request."""

    tag: Tag
    result: StoreResult


class Delivered(NamedTuple):
    """A message of a watch."""

    tag: Tag
    message: WatchMessage


StoreEvent: TypeAlias = Tick | Answered | Delivered

# ---- Effects


class Submit(NamedTuple):
    """Send a request; its result comes back as Answered."""

    tag: Tag
    request: StoreRequest


class Watch(NamedTuple):
    """Begin a watch; its messages come back as Delivered."""

    tag: Tag
    prefix: bytes
    from_revision: int


class CancelWatch(NamedTuple):
    """End a watch."""

    tag: Tag


class ViewChanged(NamedTuple):
    """The view of the cluster has changed."""

    vb_ids: frozenset[int]
    """Partitions whose record changed."""


class Notice(NamedTuple):
    """Something to log, in words."""

    text: str


StoreEffect: TypeAlias = Submit | Watch | CancelWatch
