"""Parses the values of settings, from text or numbers. Pure.

Each reader takes a value and its `Option` and returns the setting, or raises ValueError with the
reason; `dcp.server.config.sources` adds where the value came from. `size_text` and
`duration_text` go the other way.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

NONE: Final = "none"
"""The value of a setting for a file that is not given."""
AUTO: Final = "auto"
"""The value of a size that the server chooses at start."""

SIZE_UNITS: Final = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip
DURATION_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_BUCKET_NAME: Final = re.compile(r"(?!\.)[A-Za-z0-9._%-]{1,100}")
_HOST_NAME: Final = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", re.IGNORECASE)
_NUMBER_AND_UNIT: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


class Option(NamedTuple):
    """What a setting means and what it may be."""

    doc: str
    parse: Callable[[object, Option], Any]
    metavar: str
    minimum: float = 0
    maximum: float = 0
    choices: tuple[str, ...] = ()
    zero_means: str = ""
    """What 0 means if it is outside minimum to maximum."""
    flag_value: str = ""
    """What the flag means without a value; "": it needs one."""


def read_host(value: object, _option: Option) -> str:
    """Return an address or host name."""
    if not isinstance(value, str) or not value.strip() or any(c.isspace() for c in value):
        raise ValueError("must be an address or a host name")
    if value == "*":
        raise ValueError("must be an address; for all of this machine, 0.0.0.0 (or :: for IPv6)")
    try:
        value.encode("idna")
    except UnicodeError:  # an empty label, for example
        raise ValueError("must be an address or a host name") from None
    return value


def read_host_or_none(value: object, option: Option) -> str | None:
    """Return an address or host name; "none" is None."""
    return None if value == NONE else read_host(value, option)


def read_store_url(value: object, _option: Option) -> str:
    """Return the name or URL of a metadata store. It is read when a cluster is made."""
    if not isinstance(value, str) or not value.strip() or any(c.isspace() for c in value):
        raise ValueError("must be embedded, or a URL without spaces")
    return value


def is_host_name(text: str) -> bool:
    """Return whether a text has the form of a host name or an IPv4 address."""
    return _HOST_NAME.fullmatch(text) is not None


def read_bucket(value: object, _option: Option) -> str:
    """Return the name of a bucket, by Couchbase's rules."""
    if not isinstance(value, str) or _BUCKET_NAME.fullmatch(value) is None:
        raise ValueError("must be 1 to 100 letters, digits, or of . _ % -, and begin with no dot")
    return value


def read_names(value: object, _option: Option) -> tuple[str, ...]:
    """Return host names from "a,.b" or a list of them; "*" is any, "none" is none."""
    texts = value.split(",") if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be host names, separated by commas")
    names = tuple(text.strip() for text in texts)
    if names in {(NONE,), ("",)}:
        return ()
    for name in names:
        if name != "*" and not is_host_name(name.removeprefix(".")):
            raise ValueError(
                f"must be host names without a port, separated by commas, not {name!r}; "
                ".example.com stands for example.com and all names below it, * for any name"
            )
    return names


def read_path(value: object, _option: Option) -> Path:
    """Return the path of a folder."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be the path of a folder")
    return Path(value).expanduser()


def read_file(value: object, _option: Option) -> Path | None:
    """Return the path of a file, None for "none"."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be the path of a file, or none")
    return None if value == NONE else Path(value).expanduser()


def read_name_or_off(value: object, _option: Option) -> str:
    """Return the path of a file as text, or "off"."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be the path of a file, or off")
    return value


def read_choice(value: object, option: Option) -> str:
    """Return one of the option's choices."""
    if value in option.choices:
        return str(value)
    raise ValueError(f"must be one of {', '.join(option.choices)}{_suggestion(value, option)}")


def read_count(value: object, option: Option) -> int:
    """Return a whole number in the range of the option."""
    text = str(value).strip()
    is_number = not isinstance(value, bool) and text.isascii() and text.isdigit()
    if not (is_number and len(text) <= 20 and option.minimum <= int(text) <= option.maximum):
        raise ValueError(
            f"must be a whole number from {option.minimum:.0f} to {option.maximum:.0f}"
        )
    return int(text)


def read_choice_or_auto(value: object, option: Option) -> int | None:
    """Return one of the option's choices, which are numbers; "auto" is None."""
    text = str(value).strip().lower()
    if text == AUTO:
        return None
    if isinstance(value, bool) or text not in option.choices:
        raise ValueError(f"must be one of {', '.join(option.choices)}, or auto")
    return int(text)


def read_size(value: object, option: Option) -> int:
    """Return bytes from "16MiB" and the like."""
    number, unit = _number_and_unit(value)
    if number is None or unit.lower() not in SIZE_UNITS:
        raise ValueError('must be a size such as 1048576, "16MB" or "16MiB"')
    return int(_in_range(number * SIZE_UNITS[unit.lower()], option, size_text))


def read_size_or_auto(value: object, option: Option) -> int | None:
    """Return bytes; "auto" is None."""
    if isinstance(value, str) and value.strip().lower() == AUTO:
        return None
    try:
        return read_size(value, option)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from None


def read_duration(value: object, option: Option) -> float:
    """Return seconds from "250ms" and the like."""
    number, unit = _number_and_unit(value)
    if number == 0 and unit in {"", *DURATION_UNITS}:
        return _in_range(0.0, option, duration_text)
    if number is None or unit not in DURATION_UNITS:
        raise ValueError('must be a duration with its unit, such as "250ms", "10s" or "5m"')
    return _in_range(number * DURATION_UNITS[unit], option, duration_text)


def _number_and_unit(value: object) -> tuple[float | None, str]:
    if isinstance(value, bool):
        return None, ""
    found = _NUMBER_AND_UNIT.fullmatch(str(value).strip())
    return (float(found[1]), found[2]) if found else (None, "")


def _in_range(number: float, option: Option, text_of: Callable[[float], str]) -> float:
    if option.minimum <= number <= option.maximum or (number == 0 and option.zero_means):
        return number
    zero = f", or 0 for {option.zero_means}" if option.zero_means else ""
    raise ValueError(f"must be from {text_of(option.minimum)} to {text_of(option.maximum)}{zero}")


def size_text(size_bytes: float) -> str:
    """Return a size as people write it: 67108864 is 64MiB."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = SIZE_UNITS[unit.lower()]
        if size_bytes >= factor and size_bytes % factor == 0:
            return f"{size_bytes / factor:.0f}{unit}"
    return f"{size_bytes:.0f}"


def duration_text(duration_s: float) -> str:
    """Return a duration as people write it: 0.25 is 250ms."""
    for unit in ("d", "h", "m", "s", "ms"):
        count = round(duration_s / DURATION_UNITS[unit], 6)
        if count >= 1 and count == int(count):
            return f"{count:.0f}{unit}"
    return f"{duration_s / DURATION_UNITS['us']:.0f}us" if duration_s else "0"


def _suggestion(value: object, option: Option) -> str:
    close = difflib.get_close_matches(str(value).lower(), option.choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""
