"""When a document expires: --ttl and --expiry. Without datetime, unless a date is written."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

RELATIVE_MAX_S: Final = 30 * 86_400
"""The protocol takes larger numbers for Unix times."""
UNIX_MAX_S: Final = 2**32 - 1
_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_TIME: Final = re.compile(r"([0-9]{1,10})([smhdw]?)")
_F = TypeVar("_F", bound=Callable[..., Any])


def ttl_of(text: str | int) -> int:
    """Return a time to live, such as 90 (seconds), 5m, 2h or 30d, as the protocol has it.

    Raises click.BadParameter.
    """
    found = _TIME.fullmatch(str(text).strip())
    ttl_s = int(found[1]) * _UNITS_S[found[2]] if found else 0
    if not ttl_s:
        raise click.BadParameter(f"{str(text)!r} is no time to live: write 90 (seconds), 5m, 30d")
    return _expiry_of(time.time() + ttl_s, str(text)) if ttl_s > RELATIVE_MAX_S else ttl_s


def expiry_of(text: str | int) -> int:
    """Return an expiry as the protocol has it: what `ttl_of` takes, a date or a time (UTC, unless
    it says another zone), Unix seconds, or never (0). Raises click.BadParameter.
    """
    written = str(text).strip()
    if written in {"0", "never"}:
        return 0
    if written.isascii() and written.isdigit() and int(written[:11]) > RELATIVE_MAX_S:
        return _expiry_of(int(written[:11]), written)
    if _TIME.fullmatch(written):
        return ttl_of(written)
    from datetime import UTC, datetime

    try:
        moment = datetime.fromisoformat(written)
        at_s = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{written!r} says no time: write 5m, 2h or 30d from now, a date (2027-01-31 or"
            " 2027-01-31T12:00Z), Unix seconds, or never"
        ) from None
    return _expiry_of(at_s, written)


def expiry_text(at_s: object) -> str:
    """Return Unix seconds as a time in UTC; "" for None."""
    if not isinstance(at_s, int):
        return ""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


def _expiry_of(at_s: float, text: str) -> int:
    """Return a Unix time. Raises click.BadParameter for one that is over, or too late."""
    if at_s > UNIX_MAX_S:
        raise click.BadParameter(f"{text!r} is too late: the last is 2106-02-07, or write never")
    if at_s <= time.time():
        raise click.BadParameter(
            f"{text!r} is over: the document would be gone at once. To delete one: dcpctl del KEY"
        )
    return int(at_s)


def with_expiry(command: _F) -> _F:
    """Add --ttl and --expiry; the command gets `expiry`, None if neither was given."""
    from functools import wraps

    @wraps(command)
    def run(*, ttl: int | None, expiry: int | None, **arguments: Any) -> Any:
        if ttl is not None and expiry is not None:
            raise click.UsageError("--ttl and --expiry say the same: use one of them")
        return command(expiry=expiry if ttl is None else ttl, **arguments)

    options = (
        click.option(
            "--ttl", type=ttl_of, metavar="TIME", help="Time to live: 90 (seconds), 5m, 2h, 30d."
        ),
        click.option(
            "--expiry", type=expiry_of, metavar="WHEN",
            help="When it expires: as --ttl, or a date or time (2027-01-31, 2027-01-31T12:00Z;"
            " UTC), Unix seconds, or never.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        run = option(run)
    return run  # type: ignore[return-value]  # click's options keep a function a function
