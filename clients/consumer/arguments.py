"""Checks of the Consumer's arguments, when they are given. Pure.

A bad argument that is found later costs a connection, and each attempt again. Every check raises
ValueError, which names the argument, what it is, and what it may be.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from clients.position import Position
from clients.streaming.stream_connection import NAME_BYTES_MAX
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


def check_name(name: object) -> str:
    """Return the name of a DCP connection."""
    if not isinstance(name, str):
        raise ValueError(f"name {name!r}: it must be a text")
    if not 0 < len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX:
        raise ValueError(f"name {name[:80]!r}: a connection's name has 1 to {NAME_BYTES_MAX} bytes")
    return name


def check_switches(**switches: object) -> None:
    """Check that options are True or False. A text such as "no" would count as True."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} {value!r}: it must be True or False")


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


def check_numbers(
    buffer_bytes: object,
    *,
    noop_interval_s: object,
    save_every_s: object,
    connect_timeout_s: object,
    give_up_after_s: object,
    stall_s: object,
) -> None:
    """Check the sizes and times of a Consumer. None: it does not save by itself, or never gives
    up.
    """
    check_buffer(buffer_bytes)
    check_seconds("noop_interval_s", noop_interval_s, NOOP_INTERVAL_MIN_S, NOOP_INTERVAL_MAX_S)
    if save_every_s is not None:
        check_seconds("save_every_s", save_every_s)
    check_seconds("connect_timeout_s", connect_timeout_s)
    if give_up_after_s is not None:
        check_seconds("give_up_after_s", give_up_after_s, may_be_0=True)
    check_seconds("stall_s", stall_s)


def check_buffer(buffer_bytes: object) -> None:
    """Check the flow control window."""
    if not _is_whole(buffer_bytes, 1, BUFFER_BYTES_MAX):
        raise ValueError(
            f"buffer_bytes {buffer_bytes!r}: it must be a whole number from 1 to {BUFFER_BYTES_MAX}"
        )


def check_partitions(vbuckets: Iterable[object]) -> list[int]:
    """Return the partitions to follow, sorted."""
    chosen: set[int] = set()
    for vb_id in vbuckets:
        chosen.add(check_partition("vbuckets", vb_id))
    if not chosen:
        raise ValueError("vbuckets is empty: use None for all partitions")
    return sorted(chosen)


def check_partition(name: str, vb_id: object) -> int:
    """Return the number of a partition."""
    if not _is_whole(vb_id, 0, PARTITIONS_MAX - 1):
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
        elif not _is_whole(place, 0, SEQNO_MAX):
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
        _is_whole(number, 0, 2**64 - 1) for group in (numbers, *pairs) for number in group
    )
    if not are_numbers or not position.snap_start <= position.seqno <= position.snap_end:
        raise ValueError(
            f"start {{{vb_id!r}: {position!r}}}: this Position cannot be; its numbers are 0 to"
            " 2^64 - 1, and its seqno is in its snapshot"
        )


def check_collections(chosen: list[object]) -> None:
    """Check the names and ids of collections."""
    for item in chosen:
        if isinstance(item, str) and item.strip():
            continue
        if not _is_whole(item, 0, COLLECTION_ID_MAX):
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


def _is_whole(value: object, minimum: int, maximum: int) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and minimum <= value <= maximum  # type: ignore[operator]
