"""dcpctl keys: list keys, all or those with a prefix, sorted."""

from __future__ import annotations

import asyncio
from difflib import get_close_matches
from heapq import nsmallest
from typing import Final

import click

from clients.cli.dcpctl import Target, help_text, with_target
from clients.cli.output import is_terminal, shown, text_fields, write_json, write_raw
from clients.errors import DcpdError
from clients.kv.key_listing import list_keys

SORTED_MAX: Final = 1_000_000
"""Most keys that are sorted: they are in memory, 100 MB of them."""
NEAR_MAX: Final = 2_000
NEAR_S: Final = 1.0


@click.command(
    "keys",
    help=help_text(
        "List the keys, or those that begin with PREFIX, sorted by their bytes. It needs the role"
        " read.",
        "dcpctl keys",
        "dcpctl keys user: --limit 20",
        "dcpctl keys --collection shop.orders -o json",
        "dcpctl keys --unsorted | wc -l",
    ),
)
@click.argument("prefix", required=False, default="")
@click.option("--collection", metavar="SCOPE.COLLECTION", help="Of this collection.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N keys.")
@click.option("--unsorted", is_flag=True, help="Print keys as they come, for any number of keys.")
@with_target
def keys(
    *, target: Target, prefix: str, collection: str | None, limit: int | None, unsorted: bool
) -> None:
    """List keys."""
    if unsorted and limit is not None:
        raise click.UsageError("--limit needs the order: leave out --unsorted, or use head -n")
    listing = _Listing(target, prefix.encode(errors="surrogateescape"), collection)
    asyncio.run(listing.print_unsorted() if unsorted else listing.print_sorted(limit))


def near_keys(target: Target, key: bytes, collection: str | None) -> list[bytes]:
    """Return up to three keys that are like one: those that begin with its first half are looked
    at, at most NEAR_MAX of them, for a second. None if they cannot be listed.
    """

    async def begin_alike() -> list[str]:
        found: list[str] = []
        chunks = list_keys(
            target.address, key[: len(key) // 2], collection=collection, timeout_s=NEAR_S
        )
        async for chunk in chunks:
            found += [each.decode(errors="surrogateescape") for each in chunk]
            if len(found) >= NEAR_MAX:
                break
        return found

    async def in_time() -> list[str]:
        return await asyncio.wait_for(begin_alike(), NEAR_S)

    try:
        names = asyncio.run(in_time())
    except (DcpdError, TimeoutError):
        return []
    wanted = key.decode(errors="surrogateescape")
    near = get_close_matches(wanted, names[:NEAR_MAX], n=3)
    return [each.encode(errors="surrogateescape") for each in near]


class _Listing:
    """One listing."""

    def __init__(self, target: Target, prefix: bytes, collection: str | None) -> None:
        self._chunks = list_keys(
            target.address, prefix, collection=collection, timeout_s=target.timeout_s
        )
        self._mode = target.output_or("plain" if is_terminal() else "raw")

    async def print_unsorted(self) -> None:
        """Print the keys as they come."""
        async for chunk in self._chunks:
            self._print(chunk)

    async def print_sorted(self, limit: int | None) -> None:
        """Print the keys in order, or the first of them. Raises DcpdError for too many keys."""
        found: list[bytes] = []
        async for chunk in self._chunks:
            found += chunk
            if limit is not None and len(found) > 2 * limit:
                found = nsmallest(limit, found)
            if len(found) > SORTED_MAX:
                raise DcpdError(
                    f"there are more than {SORTED_MAX} keys, too many to sort",
                    hint="Use a longer prefix, --limit N, or --unsorted.",
                )
        self._print(sorted(found)[:limit])

    def _print(self, found: list[bytes]) -> None:
        if self._mode == "json":
            for key in found:
                write_json(dict(text_fields("key", key)))
        elif self._mode == "raw":
            write_raw(b"".join(key + b"\n" for key in found))
        else:
            write_raw("".join(f"{shown(key)}\n" for key in found).encode())
