"""Figures as people read them. Pure."""

from __future__ import annotations


def size_text(size_bytes: float) -> str:
    """Return a size with its unit, such as 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def count_text(count: float) -> str:
    """Return a number with commas, such as 12,345."""
    return f"{count:,.0f}"


def rate_text(rate: float | None) -> str:
    """Return a rate: with one digit after the point below 100; "-" if it was not measured."""
    if rate is None:
        return "-"
    return f"{rate:.1f}" if 0 < rate < 100 else f"{rate:,.0f}"


def share_text(part: float, whole: float) -> str:
    """Return a share, such as 34 %."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def age_text(seconds: float) -> str:
    """Return a time in its two largest units, such as 2h 5m."""
    left = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
