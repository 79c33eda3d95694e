"""The options of a Consumer, in one frozen structure. Pure.

    options = ConsumerOptions(collections="shop.orders", until_now=True)
    Consumer("127.0.0.1:11210", options)
    Consumer("127.0.0.1:11210", collections="shop.orders", until_now=True)      # the same

Each option is checked when it is given: a bad one that is found later costs a connection, and each
attempt again. Every check raises ValueError, which names the option, what it is, and what it may
be.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, Literal, TypedDict, cast

from clients.checkpoint.checkpoint import CheckpointStore
from clients.consumer.group import Group
from clients.event import Rollback
from clients.kv.held import Held
from clients.position import Filter, Position
from clients.streaming.stream_connection import BUFFER_BYTES, NAME_BYTES_MAX, NOOP_INTERVAL_S
from dcp.wire.frame import MAX_KEY_BYTES

PARTITIONS_MAX: Final = 1024
"""Partitions of a server: `dcpd` and Couchbase Server have no more."""
SEQNO_MAX: Final = 2**64 - 2
"""Highest seqno to start at. 2^64 - 1 means "no end" in DCP."""
COLLECTION_ID_MAX: Final = 2**32 - 1
BUFFER_BYTES_MAX: Final = 2**32 - 1
"""Largest flow control window (control connection_buffer_size)."""
NOOP_INTERVAL_MIN_S: Final = 0.1
NOOP_INTERVAL_MAX_S: Final = 86_399.0
"""What servers take (control set_noop_interval)."""
STALL_S: Final = 60.0
"""If a stream is behind and does not move for this time, it is requested again. If a request is not
answered for this time, its connection is closed."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Start = Literal["beginning", "now"] | datetime | Mapping[int, Position | int]
"""Where to begin; see `clients.consumer.starting_point`."""
Chosen = Literal["all"] | tuple[str | int, ...] | None
"""Collections by name or id; None: the default collection only."""


Decision = Literal["undo", "restart", "fail"] | int | Position
"""What to do: "undo" goes back to the event's seqno, "restart" to 0, "fail" raises
HistoryBranchedError. A seqno means the newest complete state at or below it. A Position: the user
has brought the partition to that state by other means, and follows it from there."""
OnRollback = (
    Literal["undo", "restart", "fail"] | Callable[[Rollback], Decision | Awaitable[Decision]]
)
_WORDS: Final = ("undo", "restart", "fail")


@dataclass(frozen=True)
class ConsumerOptions:
    """What a Consumer follows, and how. Raises ValueError for an option that it cannot take.

    docs/consumers.md explains what they promise together.
    """

    name: str | None = None
    """Name of the DCP connections; None: a random one. A second consumer with the same name
    disconnects the first. Members of a group get their number appended."""
    vbuckets: Iterable[int] | None = None
    """The partitions to follow; None for all."""
    group: Group | None = None
    """Follow the share of a group's member."""
    start: Start = "beginning"
    """Where partitions without a checkpoint start: "beginning", "now", a datetime with a zone, or a
    Position or seqno by partition."""
    store: CheckpointStore | None = None
    """It is loaded when the consumer opens, and written by `save`."""
    save_every_s: float | None = None
    """Also save at this interval, without the events that the user is still processing."""
    until_now: bool = False
    """End when every partition has reached the high seqno that it had at the start."""
    on_rollback: OnRollback = "undo"
    """"undo" goes back to the newest complete state at or below the server's seqno, for users who
    can restore it. "restart" goes to 0, for users who rebuild the partition. "fail" raises
    HistoryBranchedError. A function gets the Rollback after all earlier events are processed, and
    returns one of these words, or a seqno: then the consumer goes back to the newest complete state
    at or below it."""
    held: Held | None = None
    """What you hold already. A partition that would begin at 0, with or without a Rollback, is then
    compared with it by hashes: you get Differences, and the stream from there."""
    collections: Iterable[str | int] | str | None = None
    """Names ("scope.collection") or ids to follow, or one name; "all" for all; None for the default
    collection only. If it is set, there are system events, and events have the id of their
    collection. A name is looked up once, because a collection that is dropped and created again is
    a different one."""
    key_prefixes: Iterable[str | bytes] | str | bytes = ()
    """Only documents whose key begins with one of them; () for all. The server filters if it can;
    otherwise the consumer does, with the same result."""
    history: bool = False
    """Every version of a document, not only the newest, as far back as the server keeps them. A
    server that does not support this streams as usual."""
    previous_values: bool = False
    """Events have the value that they replaced. A server that does not support this streams as
    usual."""
    xattrs: bool = False
    """Events have the XATTRs of the document."""
    from_replicas: bool = False
    """Read from copies that are not masters: complete snapshots of what is committed, with the same
    positions. A copy that cannot serve a partition is passed over; the master comes last."""
    cuts: bool = False
    """Ask the server for consistent cuts (`Consumer.cuts`, `Consumer.frontier`). Other
    servers refuse that (docs/consistent-cuts.md)."""
    rack: str = ""
    """With `from_replicas`: the rack that the consumer is in, as nodes name theirs. Copies there
    come first."""
    events_per_s: float | None = None
    """Maximum rate of events; None: no limit. Flow control then slows down the server."""
    buffer_bytes: int = BUFFER_BYTES
    """Flow control window: bytes that a node may send before they are processed."""
    noop_interval_s: float = NOOP_INTERVAL_S
    """How often the server asks for a sign of life."""
    validate: bool = False
    """Check every event (StreamViolationError)."""
    connect_timeout_s: float = 5.0
    """How long one attempt to connect may take, with its login."""
    give_up_after_s: float | None = None
    """How long to try to reconnect; None for ever. When the consumer opens, every node is tried
    once."""
    stall_s: float = STALL_S
    """A stream that is behind and makes no progress for this time is requested again. A connection
    that leaves a request unanswered for this time is closed."""

    def __post_init__(self) -> None:
        """Check each option. Iterables are read once, so they become tuples."""
        check_switches(
            until_now=self.until_now, validate=self.validate, history=self.history,
            previous_values=self.previous_values, xattrs=self.xattrs,
            from_replicas=self.from_replicas, cuts=self.cuts,
        )  # fmt: skip
        if self.cuts and (self.until_now or self.save_every_s is not None or self.from_replicas):
            raise ValueError(
                "cuts cannot be used with until_now, save_every_s or from_replicas: a cut ends at a"
                " moment of the server, positions are saved after whole cuts (Consumer.save), and"
                " copies tell none"
            )
        check_buffer(self.buffer_bytes)
        check_seconds(
            "noop_interval_s", self.noop_interval_s, NOOP_INTERVAL_MIN_S, NOOP_INTERVAL_MAX_S
        )
        check_seconds("connect_timeout_s", self.connect_timeout_s)
        check_seconds("stall_s", self.stall_s)
        if self.save_every_s is not None:
            check_seconds("save_every_s", self.save_every_s)
        if self.give_up_after_s is not None:
            check_seconds("give_up_after_s", self.give_up_after_s, may_be_0=True)
        if self.events_per_s is not None:
            check_rate(self.events_per_s)
        check_rack(self.rack, from_replicas=self.from_replicas)
        if self.vbuckets is not None and self.group is not None:
            raise ValueError("use either vbuckets or group: a group selects its own partitions")
        if self.store is not None:
            check_store(self.store, is_part=self.vbuckets is not None or self.group is not None)
        elif self.save_every_s is not None:
            raise ValueError("save_every_s needs a store, such as CheckpointFile(path)")
        check_names(self.name, self.group)
        check_start(self.start)
        check_strategy(self.on_rollback)
        if self.held is not None:
            check_held(self)
        given = None if self.vbuckets is None else check_partitions(self.vbuckets)
        object.__setattr__(self, "vbuckets", given)
        object.__setattr__(self, "collections", chosen_collections(self.collections))
        object.__setattr__(self, "key_prefixes", prefixes_of(self.key_prefixes))

    @property
    def chosen(self) -> Chosen:
        """The collections, as they were checked."""
        return cast("Chosen", self.collections)

    @property
    def prefixes(self) -> tuple[bytes, ...]:
        """The key prefixes as bytes."""
        return cast("tuple[bytes, ...]", self.key_prefixes)

    @property
    def asks_on_rollback(self) -> bool:
        """Whether a rollback waits for a decision."""
        return self.held is not None or self.on_rollback not in {"undo", "restart"}

    @property
    def filter(self) -> Filter:
        """Which documents are followed, as positions name it."""
        chosen = self.chosen
        return Filter.of(() if chosen == "all" else chosen, self.prefixes)


class FollowArguments(TypedDict, total=False):
    """Keyword arguments of a Mirror: the fields of ConsumerOptions that it leaves to the user."""

    name: str | None
    vbuckets: Iterable[int] | None
    group: Group | None
    until_now: bool
    cuts: bool
    from_replicas: bool
    rack: str
    events_per_s: float | None
    buffer_bytes: int
    noop_interval_s: float
    validate: bool
    connect_timeout_s: float
    give_up_after_s: float | None
    stall_s: float


class ConsumerArguments(FollowArguments, total=False):
    """Keyword arguments of a Consumer: the fields of ConsumerOptions."""

    start: Start
    store: CheckpointStore | None
    save_every_s: float | None
    on_rollback: OnRollback
    held: Held | None
    collections: Iterable[str | int] | str | None
    key_prefixes: Iterable[str | bytes] | str | bytes
    history: bool
    previous_values: bool
    xattrs: bool


def options_of(options: ConsumerOptions | None, given: ConsumerArguments) -> ConsumerOptions:
    """Return options, with those that were given as keyword arguments instead of theirs."""
    return ConsumerOptions(**given) if options is None else replace(options, **given)


def check_names(name: object, group: object) -> None:
    """Check the name of the connections, and the group whose member's number it gets."""
    if group is not None:
        if not isinstance(group, Group):
            raise ValueError(f"group {group!r}: it must be a Group(member, size)")
        group.checked()
    if name is not None:
        _check_name(name)
        if group is not None:
            _check_name(f"{name}:{group.member}")


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ValueError(f"name {name!r}: it must be a text")
    if not 0 < len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX:
        raise ValueError(f"name {name[:80]!r}: a connection's name has 1 to {NAME_BYTES_MAX} bytes")


def check_switches(**switches: object) -> None:
    """Check that options are True or False. A text such as "no" would count as True."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} {value!r}: it must be True or False")


def check_rack(rack: object, *, from_replicas: bool) -> None:
    """Check the rack of a consumer."""
    if not isinstance(rack, str) or (rack and not from_replicas):
        raise ValueError(f"rack {rack!r}: a text, and it goes with from_replicas=True")


def check_seconds(
    name: str,
    value: object,
    minimum: float = 0.0,
    maximum: float = math.inf,
    *,
    may_be_0: bool = False,
) -> None:
    """Check a time in seconds: above 0, or from 0 on, and within the limits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):  # type: ignore[arg-type]
        raise ValueError(f"{name} {value!r}: it must be a number of seconds")
    assert isinstance(value, int | float), "checked"
    is_low = value < minimum or (value == 0 and not may_be_0)
    if is_low or value > maximum:
        above = f"at least {minimum:g}" if minimum or may_be_0 else "above 0"
        below = "" if math.isinf(maximum) else f" and at most {maximum:g}"
        raise ValueError(f"{name} {value!r}: it must be {above}{below} (seconds)")


def check_rate(events_per_s: object) -> None:
    """Check the maximum rate of events."""
    is_number = isinstance(events_per_s, int | float) and not isinstance(events_per_s, bool)
    if not is_number or not 0 < events_per_s < math.inf:  # type: ignore[operator]
        raise ValueError(
            f"events_per_s {events_per_s!r}: it must be a number above 0, or None for no limit"
        )


def check_buffer(buffer_bytes: object) -> None:
    """Check the flow control window."""
    if not _is_in(buffer_bytes, 1, BUFFER_BYTES_MAX):
        raise ValueError(
            f"buffer_bytes {buffer_bytes!r}: it must be a whole number from 1 to {BUFFER_BYTES_MAX}"
        )


def check_partitions(vbuckets: Iterable[object]) -> tuple[int, ...]:
    """Return the partitions to follow, sorted."""
    chosen: set[int] = set()
    for vb_id in vbuckets:
        chosen.add(check_partition("vbuckets", vb_id))
    if not chosen:
        raise ValueError("vbuckets is empty: use None for all partitions")
    return tuple(sorted(chosen))


def check_partition(name: str, vb_id: object) -> int:
    """Return the number of a partition."""
    if not _is_in(vb_id, 0, PARTITIONS_MAX - 1):
        raise ValueError(
            f"{name}: there is no partition {vb_id!r}; they are numbered 0 to {PARTITIONS_MAX - 1}"
        )
    assert isinstance(vb_id, int), "checked"
    return vb_id


def check_starts(start: Mapping[object, object]) -> None:
    """Check the option `start` if it is a mapping."""
    for vb_id, place in start.items():
        check_partition("start", vb_id)
        if isinstance(place, Position):
            _check_position(vb_id, place)
        elif not _is_in(place, 0, SEQNO_MAX):
            raise ValueError(
                f"start {{{vb_id!r}: {place!r}}}: map partitions to a Position"
                " (decode_position reads the bytes of encode_position), or to a seqno from 0 to"
                f" {SEQNO_MAX}"
            )


def _check_position(vb_id: object, position: Position) -> None:
    """Check the numbers of a Position, which anybody can make."""
    numbers = (position.seqno, position.snap_start, position.snap_end, position.base_seqno)
    pairs = (*position.versions, *position.complete)
    are_numbers = all(
        _is_in(number, 0, 2**64 - 1) for group in (numbers, *pairs) for number in group
    )
    if not are_numbers or not position.snap_start <= position.seqno <= position.snap_end:
        raise ValueError(
            f"start {{{vb_id!r}: {position!r}}}: this Position cannot be; its numbers are 0 to"
            " 2^64 - 1, and its seqno is in its snapshot"
        )


def check_collections(chosen: tuple[object, ...]) -> None:
    """Check the names and ids of collections."""
    for item in chosen:
        if isinstance(item, str) and item.strip():
            continue
        if not _is_in(item, 0, COLLECTION_ID_MAX):
            raise ValueError(
                f'collections: {item!r} is no collection; write "scope.collection" or an id from 0'
                f" to {COLLECTION_ID_MAX}"
            )


def check_prefixes(prefixes: Iterable[object]) -> tuple[bytes, ...]:
    """Return key prefixes as bytes."""
    checked = []
    for given in prefixes:
        if not isinstance(given, str | bytes):
            raise ValueError(f"key_prefixes: {given!r} is neither text nor bytes")
        prefix = given.encode() if isinstance(given, str) else given
        if not prefix:
            raise ValueError("an empty prefix matches every key: leave out key_prefixes")
        if len(prefix) > MAX_KEY_BYTES:
            raise ValueError(
                f"key_prefixes: {prefix[:40]!r}... has {len(prefix)} bytes, and a key at most"
                f" {MAX_KEY_BYTES}"
            )
        checked.append(prefix)
    return tuple(checked)


def time_ns_of(moment: datetime) -> int:
    """Return nanoseconds since the Unix epoch. Raises ValueError for a time without a zone."""
    if moment.tzinfo is None:
        raise ValueError(f"start {moment.isoformat()} has no time zone: set tzinfo")
    since = moment - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000


def check_start(start: Start) -> Start:
    """Return the option. Raises ValueError if it is invalid."""
    if isinstance(start, datetime):
        time_ns_of(start)
    elif isinstance(start, Mapping):
        check_starts(start)  # type: ignore[arg-type]
    elif start not in ("beginning", "now"):
        raise ValueError(
            f'start {start!r}: use "beginning", "now", a datetime with a zone, or a mapping of'
            " partitions to Positions or seqnos"
        )
    return start


def chosen_collections(given: Iterable[str | int] | str | None) -> Chosen:
    """Return the chosen collections as a tuple. Raises ValueError if the list is empty."""
    if given is None or given == "all":
        return "all" if given else None
    chosen = (given,) if isinstance(given, str) else tuple(given)
    if not chosen:
        raise ValueError('collections is empty: use None for the default one, "all" for all')
    check_collections(chosen)
    return chosen


def prefixes_of(given: Iterable[str | bytes] | str | bytes) -> tuple[bytes, ...]:
    """Return one or several key prefixes as bytes. Raises ValueError for one that no key has."""
    return check_prefixes([given] if isinstance(given, str | bytes) else given)


def check_store(store: object, *, is_part: bool) -> None:
    """Raise ValueError if a store cannot keep the consumer's checkpoint.

    `is_part`: the consumer follows only some of the partitions.
    """
    if not (hasattr(store, "load") and hasattr(store, "save")):
        raise ValueError(f"store {store!r}: it needs load and save, as in CheckpointFile(path)")
    if is_part and not (hasattr(store, "save_changes") or is_whole(store)):
        raise ValueError(
            f"store {store!r} with a group or vbuckets: if several consumers share it, each would"
            " overwrite the positions of the others. Add save_changes(changed), which writes only"
            " those; or is_whole = True if one consumer owns the store and save replaces all"
        )


def is_whole(store: object) -> bool:
    """Whether a store belongs to one consumer, and a save replaces all of it."""
    return bool(getattr(store, "is_whole", False))


def _is_in(value: object, minimum: int, maximum: int) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and minimum <= value <= maximum  # type: ignore[operator]


def check_held(options: ConsumerOptions) -> None:
    """Raise ValueError for options with which documents cannot be compared by hashes."""
    if not isinstance(options.held, Held):
        raise ValueError(f"held {options.held!r}: it must be an object of a class of yours, a Held")
    refused = {
        "key_prefixes": (options.key_prefixes, "hashes are those of all keys"),
        "collections='all'": (options.collections == "all", "name those that you hold"),
        "xattrs": (options.xattrs, "documents that differ come without XATTRs"),
        "history": (options.history, "of documents that differ only the newest version comes"),
        "previous_values": (options.previous_values, "documents that differ have none"),
        f"start={options.start!r}": (
            options.start != "beginning" and not isinstance(options.start, Mapping),
            "it is not at 0",
        ),
    }
    for name, (is_given, why) in refused.items():
        if is_given:
            raise ValueError(f"held cannot be used with {name}: {why}")


def check_strategy(strategy: OnRollback) -> OnRollback:
    """Return the strategy. Raises ValueError if it is not a known word or a function."""
    if not callable(strategy) and strategy not in _WORDS:
        raise ValueError(
            f"on_rollback {strategy!r}: use {', '.join(map(repr, _WORDS))}, or a function that gets"
            " the Rollback and returns one of them or a seqno"
        )
    return strategy
