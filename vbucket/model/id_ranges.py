"""Sets of partitions as text, for example 0-5,9. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def id_ranges(vb_ids: Iterable[int]) -> str:
    """Return partitions as ranges, in ascending order; "" for none."""
    ordered = sorted(set(vb_ids))
    starts = [n for at, n in enumerate(ordered) if at == 0 or ordered[at - 1] != n - 1]
    ends = [n for at, n in enumerate(ordered) if at + 1 == len(ordered) or ordered[at + 1] != n + 1]
    return ",".join(
        str(start) if start == end else f"{start}-{end}"
        for start, end in zip(starts, ends, strict=True)
    )


def ids_in(text: str) -> set[int]:
    """Return the partitions of such a text. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
