"""--vb: the one way to name partitions, as 17, or as 3,17-20 where several are allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any, Final, TypeVar

import click

from vbucket.model.ids import NUM_VBUCKETS, ids_in

VB: Final = click.IntRange(0, NUM_VBUCKETS - 1)
"""The type of one partition."""
_RANGES: Final = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
_F = TypeVar("_F", bound=Callable[..., Any])


def vb_ranges(text: str) -> frozenset[int]:
    """Return several partitions, such as 3,17-20. Raises click.BadParameter."""
    found = ids_in(text) if _RANGES.fullmatch(text) else set()
    if not found or max(found) >= NUM_VBUCKETS:
        raise click.BadParameter(
            f"{text[:40]!r} names no partitions: write 17 or 3,17-20, of 0 to {NUM_VBUCKETS - 1}"
        )
    return frozenset(found)


class _Unlisted(click.Argument):
    """An argument that stands for --vb, and is not in the help."""

    def get_usage_pieces(self, _ctx: click.Context) -> list[str]:
        """Return none."""
        return []


def with_vb(command: _F) -> _F:
    """Add --vb for one partition, which must be named; the command gets it as `vb_id`."""

    @wraps(command)
    def run(*, vb: int | None, vb_argument: tuple[int, ...], **arguments: Any) -> Any:
        named = [*vb_argument, *([] if vb is None else [vb])]
        if len(named) != 1:
            raise click.UsageError("name one partition: --vb N")
        return command(vb_id=named[0], **arguments)

    option = click.option("--vb", type=VB, metavar="N", help="The partition.")
    argument = click.argument("vb_argument", nargs=-1, type=VB, cls=_Unlisted)
    return argument(option(run))  # type: ignore[return-value]  # click keeps a function a function


def with_vbs(command: _F, meaning: str = "Only these partitions; may be repeated.") -> _F:
    """Add --vb for several partitions; the command gets them as `vb_ids`, in order."""

    @wraps(command)
    def run(
        *,
        vb: tuple[frozenset[int], ...],
        vb_argument: tuple[frozenset[int], ...],
        **arguments: Any,
    ) -> Any:
        vb_ids = tuple(sorted(frozenset().union(*vb, *vb_argument)))
        return command(vb_ids=vb_ids, **arguments)

    option = click.option("--vb", type=vb_ranges, multiple=True, metavar="N,N-N", help=meaning)
    argument = click.argument("vb_argument", nargs=-1, type=vb_ranges, cls=_Unlisted)
    return argument(option(run))  # type: ignore[return-value]  # click keeps a function a function
