"""Checks the option valueSchema: a list of columns in Spark's DDL. Pure.

    carrier STRING, flight INT, at STRUCT<airport: STRING, gate INT>, tags ARRAY<STRING>

Spark's own parser would report a position inside `STRUCT<...>`, not the option. Only what a JSON
document can provide is allowed: no NOT NULL (a member may be missing), and only text as map keys.
"""

from __future__ import annotations

import re
from typing import Final

_TOKEN: Final = re.compile(r"\s*(`(?:[^`]|``)+`|\w+|[<>(),:]|\S)")
_NAME: Final = re.compile(r"`.+`|\w+", re.DOTALL)
_SCALARS: Final = frozenset(
    {
        "STRING", "BOOLEAN", "TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT",
        "LONG", "FLOAT", "REAL", "DOUBLE", "DATE", "TIMESTAMP", "TIMESTAMP_NTZ", "TIMESTAMP_LTZ",
        "BINARY", "DECIMAL", "DEC", "NUMERIC",
    }
)  # fmt: skip
_WITH_DIGITS: Final = frozenset({"DECIMAL", "DEC", "NUMERIC"})
_DEPTH_MAX: Final = 32
"""Maximum nesting of types. Each level is a recursive call, here and in Spark."""


def check_columns(text: str) -> None:
    """Check a list of columns. Raises ValueError, which says what is wrong."""
    parser = _Parser(_TOKEN.findall(text))
    parser.columns(end="", depth=0)


class _Parser:
    """A recursive-descent parser over the tokens."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def columns(self, end: str, depth: int) -> None:
        """Parse columns up to `end`; "" is the end of the text."""
        names: set[str] = set()
        while True:
            name = self._take()
            if not _NAME.fullmatch(name):
                raise ValueError(f"a column name is missing before {_shown(name)}")
            if name.lower() in names:
                raise ValueError(f"the column {name} occurs twice")
            names.add(name.lower())
            if self._next() == ":":
                self._take()
            self._type(name, depth)
            following = self._take()
            if following == end:
                return
            if following != ",":
                raise ValueError(f"a comma is missing before {_shown(following)}")

    def _type(self, of: str, depth: int) -> None:
        word = self._take()
        kind = word.upper()
        if depth >= _DEPTH_MAX:
            raise ValueError(f"{of}: types are nested deeper than {_DEPTH_MAX}")
        if kind in _SCALARS:
            if kind in _WITH_DIGITS and self._next() == "(":
                self._digits(of)
        elif kind == "STRUCT":
            self._expect("<", of)
            self.columns(">", depth + 1)
        elif kind == "ARRAY":
            self._expect("<", of)
            self._type(of, depth + 1)
            self._expect(">", of)
        elif kind == "MAP":
            self._expect("<", of)
            if self._take().upper() != "STRING":
                raise ValueError(f"{of}: the keys of a map must be STRING, as in JSON")
            self._expect(",", of)
            self._type(of, depth + 1)
            self._expect(">", of)
        else:
            known = ", ".join(sorted(_SCALARS))
            raise ValueError(
                f"{of}: {_shown(word)} is not a type; use {known}, STRUCT<...>, ARRAY<...> or"
                " MAP<STRING, ...>"
            )

    def _digits(self, of: str) -> None:
        """Parse (PRECISION) or (PRECISION, SCALE)."""
        self._expect("(", of)
        numbers = [self._take()]
        if self._next() == ",":
            self._take()
            numbers.append(self._take())
        self._expect(")", of)
        if not all(number.isdecimal() for number in numbers) or int(numbers[0]) > 38:
            raise ValueError(f"{of}: DECIMAL takes a precision up to 38 and a scale")

    def _next(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._next()
        self._at += 1
        return token

    def _expect(self, token: str, of: str) -> None:
        found = self._take()
        if found != token:
            raise ValueError(f"{of}: {token!r} is missing before {_shown(found)}")


def _shown(token: str) -> str:
    return repr(token) if token else "the end"
