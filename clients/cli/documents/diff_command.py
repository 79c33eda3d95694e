"""dcpctl diff: compare two copies of the same documents, without reading what is equal.

JSON (`-o json`), one object per line, `"v": 1`:

    collection, key, vb, kind ("missing on A", "missing on B", "older on A", "older on B", "value"),
    a and b: cas and rev of each side, null where it has no such key
    at the end: differences, collections, seconds, received_bytes
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from clients.cli.dcpctl import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_USAGE,
    Target,
    help_text,
    with_target,
)
from clients.cli.login import address_of
from clients.cli.output import shown, text_fields, write_json
from clients.errors import DcpdError

if TYPE_CHECKING:
    from clients.kv.differences import Copy, Difference

EXIT_TROUBLE: Final = EXIT_USAGE
"""diff(1)'s third exit code, which also says that the command was misused."""


@click.command(
    "diff",
    help=help_text(
        "Compare two copies of the same documents: servers (HOST:PORT or context:NAME), the LMDB"
        " file of a mirror, a backup archive (a folder, or archive:URL), or a Spark table of"
        " apply_changes (a folder; table:FOLDER@TIME is one as of a cut that it has kept)."
        " Of servers only what differs is read. It needs the role stream."
        " Exit codes as diff(1): 0 equal, 1 they differ, 2 trouble. Documents are equal if key, CAS"
        " and revision are.",
        "dcpctl diff 127.0.0.1:11210 127.0.0.1:11220",
        "dcpctl diff context:main view.lmdb -o json",
        "dcpctl diff 127.0.0.1:11210 backups --collection shop.orders --limit 20",
    ),
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--collection", metavar="SCOPE.COLLECTION", help="Only this one. Default: all.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N keys.")
@with_target
def diff(
    *, target: Target, first: str, second: str, collection: str | None, limit: int | None
) -> int:
    """Compare two copies."""
    try:
        return asyncio.run(_Comparison(target, collection, limit).of(first, second))
    except DcpdError as error:
        vars(error)["exit_code"] = EXIT_TROUBLE
        raise


class _Comparison:
    """One comparison."""

    def __init__(self, target: Target, collection: str | None, limit: int | None) -> None:
        self._target = target
        self._collection = collection
        self._limit = limit
        self._is_json = target.output_or("plain") == "json"
        self._found = 0

    async def of(self, first: str, second: str) -> int:
        """Compare, and print what differs; return the exit code."""
        began = time.monotonic()
        opened: list[Copy] = []
        try:
            one = await _opened(self._target, first)
            opened.append(one)
            two = await _opened(self._target, second)
            opened.append(two)
            pairs = await _pairs(one, two, self._collection)
            for name, collection_ids in pairs.items():
                for side, collection_id in zip(opened, collection_ids, strict=True):
                    side.select(collection_id)
                async for each in self._differences(one, two):
                    self._print(name, each)
        finally:
            for side in opened:
                await side.close()
        received = sum(side.received_bytes for side in opened)
        seconds = time.monotonic() - began
        if self._is_json:
            write_json(
                {
                    "differences": self._found, "collections": len(pairs),
                    "seconds": round(seconds, 3), "received_bytes": received,
                }
            )  # fmt: skip
        else:
            what = f"{self._found:,} keys differ" if self._found else "equal"
            click.echo(f"{what} ({received:,} bytes read in {seconds:.1f} s)", err=True)
        return EXIT_FAILED if self._found else EXIT_OK

    async def _differences(self, one: Copy, two: Copy) -> AsyncIterator[Difference]:
        from clients.kv.hash_reads import differences

        async with aclosing(differences(one, two)) as found:
            async for some in found:
                for each in some:
                    if self._limit is not None and self._found >= self._limit:
                        return
                    self._found += 1
                    yield each

    def _print(self, collection: str, each: Difference) -> None:
        sides = [
            None if version is None else {"cas": version.cas, "rev": version.rev_seqno}
            for version in (each.first, each.second)
        ]
        if self._is_json:
            write_json(
                {"collection": collection, **text_fields("key", each.key), "vb": each.vb_id,
                 "kind": each.kind, "a": sides[0], "b": sides[1]}
            )  # fmt: skip
            return
        has = [
            f"{name}: revision {side['rev']}, CAS {side['cas']}"
            for name, side in zip("AB", sides, strict=True)
            if side is not None
        ]
        where = "" if collection == "_default._default" else f"{collection}: "
        click.echo(f"{each.kind:<13} {where}{shown(each.key)}  ({'; '.join(has)})")


async def _opened(target: Target, text: str) -> Copy:
    """Open a side. Raises DcpdError, click.UsageError."""
    from clients.kv.hash_reads import HashReader

    kind, rest = _kind_of(text)
    if kind == "archive":
        from clients.backup.archive_copy import ArchiveCopy

        return ArchiveCopy(rest)
    if kind == "mirror":
        from clients.mirror.mirror_copy import MirrorCopy

        return MirrorCopy(rest)
    if kind == "table":
        return _table(rest)
    given = target.given._replace(server=None, context=None)
    given = given._replace(**{kind: rest})
    return await HashReader.open(address_of(given), target.timeout_s)


def _table(path: str) -> Copy:
    from clients.install_hint import install_hint

    try:
        from clients.spark.sink.table_copy import TableCopy
    except ModuleNotFoundError as error:
        raise DcpdError(
            f"{path} is a Spark table, and to read it the package {error.name} is missing",
            hint=install_hint("spark"),
        ) from error
    folder, _, cut = path.rpartition("@")
    if folder and cut.isdigit() and not Path(path).is_dir():
        return TableCopy(folder, int(cut))
    return TableCopy(path)


def _kind_of(text: str) -> tuple[str, str]:
    """Return what an argument names, and the name of it there."""
    kind, _, rest = text.partition(":")
    if kind in {"archive", "mirror", "table", "context"} and rest and not rest.isdigit():
        return kind, rest
    if Path(text).is_dir():
        is_table = all((Path(text) / name).is_dir() for name in ("current", "changes"))
        return "table" if is_table else "archive", text
    return ("mirror" if Path(text).is_file() else "server"), text


async def _pairs(one: Copy, two: Copy, wanted: str | None) -> dict[str, tuple[int, int]]:
    """Return the collections to compare: name -> id on each side. Raises NotComparableError."""
    from clients.kv.differences import NotComparableError, checked_collections

    sides = (one, two)
    named = [await side.collections() for side in sides]
    known = list(named)
    for at, side in enumerate(sides):
        only = side.only_collection
        if only is not None and sides[1 - at].only_collection is None:
            by_id = {found: name for name, found in named[1 - at].items()}
            known[at] = {by_id.get(only, f"0x{only:x}"): only}
            wanted = wanted or next(iter(known[at]))
    if wanted is not None:
        for side, ids in zip((one, two), known, strict=True):
            if wanted not in ids:
                raise NotComparableError(
                    f"{side.name} has no collection {wanted}",
                    hint=f"It has {', '.join(sorted(ids))}.",
                )
        return {wanted: (known[0][wanted], known[1][wanted])}
    names = checked_collections(known[0], known[1], (one.name, two.name))
    return {name: (known[0][name], known[1][name]) for name in names}
