"""Finds where the values at some paths stand in the text of a JSON document: one pass. Pure.

    scan = new_scan(text, [path, ...])
    while scan.step(STEP_BYTES) == GOES_ON: ...
    scan.places(0)      the document and the value behind each step of the first path

The pass makes no object of a member or element, and takes a step of a bounded number of bytes at a
time. It checks the whole text, so there are places of sound documents only.

`PlainScan` defines what is found. `vbucket.native` has the same in C, 50 times as fast.

Invariants
- `places` has a place for each step that leads to something, and ends before the first one that
  does not;
- if a name stands twice in an object, its last member counts, and nothing of those before it is
  left. Index -1 is the last element;
- text that is not UTF-8 is refused only where `checks_utf8` asks for that, and an open container
  beyond `levels_max` always.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from dcp.session.subdoc.json_path import PATHS_CACHED, Key, Path
from vbucket.native import json_scan_loop

if TYPE_CHECKING:
    from vbucket.native.loops import JsonScan

GOES_ON, IS_DONE, IS_UNSOUND, IS_TOO_DEEP = range(4)
"""What `step` returns: call it again; there are places; the text is not JSON, or has too many
containers within one another."""
PATHS_MAX: Final = 16
LEVELS_MAX: Final = 1024
"""Containers within one another, of which anything is found."""

Text = bytes | memoryview
AnyScan: TypeAlias = "PlainScan | JsonScan"
"""A pass under way."""


class ValuePlace(NamedTuple):
    """Where a value stands."""

    at: int
    end: int
    name_at: int
    """Where the member begins, with the quote of its name; -1: the value has no name."""
    total: int
    """Members or elements of a container."""
    has_containers: bool
    """Whether a member or element is itself a container."""
    has_wanted: bool
    """Whether an element of the array at the path has the wanted text."""


_Step = bytes | int


@lru_cache(maxsize=PATHS_CACHED)
def steps_of(path: Path) -> tuple[_Step, ...]:
    """Return a path as a pass takes it: names as UTF-8, and indexes."""
    return tuple(step.name.encode() if isinstance(step, Key) else step for step in path)


def new_scan(
    text: Text,
    paths: Sequence[Path] = (),
    wanted: Sequence[bytes | None] | None = None,
    *,
    levels_max: int = LEVELS_MAX,
    checks_utf8: bool = False,
) -> AnyScan:
    """Return a pass over a text for up to PATHS_MAX paths. `wanted` are texts to look for among the
    elements of the arrays at the paths.
    """
    steps = tuple(map(steps_of, paths))
    looked_for = (None,) * len(steps) if wanted is None else tuple(wanted)
    return _SCAN(text, steps, looked_for, levels_max, checks_utf8)


# -- in Python -------------------------------------------------------------------------------------

_WHITE: Final = re.compile(rb"[ \t\r\n]*+")
_NUMBER: Final = re.compile(rb"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_LITERAL: Final = re.compile(rb"true|false|null")
_CHARACTERS: Final = re.compile(rb'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+')
_SURROGATES: Final = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F])"
)
_PIECE_BYTES: Final = 16 * 1024


class _EndError(Exception):
    def __init__(self, how: int) -> None:
        super().__init__(how)
        self.how = how


@dataclass(slots=True)
class _Level:
    """An open container."""

    is_object: bool
    paths: frozenset[int]
    """Those that lead here, or further on."""
    count: int = 0
    child: frozenset[int] = frozenset()
    """The paths that lead to the member or element under way."""
    child_at: int = 0
    child_name_at: int = -1
    has_containers: bool = False
    wanted_found: set[int] = field(default_factory=set)


class PlainScan:
    """See the module."""

    def __init__(
        self,
        text: Text,
        paths: tuple[tuple[_Step, ...], ...],
        wanted: tuple[bytes | None, ...],
        levels_max: int,
        checks_utf8: bool,
    ) -> None:
        self._text = text
        self._paths = paths
        self._wanted = wanted
        self._levels_max = levels_max
        self._checks_utf8 = checks_utf8
        self._found: list[list[ValuePlace | None]] = [[None] * (len(path) + 1) for path in paths]
        self._levels = [_Level(False, frozenset(range(len(paths))))]
        """The document itself stands in the first one."""
        self._stop = 0
        self._how = GOES_ON
        self._pass = self._document()
        self.depth = 0
        """The most containers within one another so far."""

    def step(self, bytes_max: int, /) -> int:
        """Go on for about as many bytes; return GOES_ON, or how the pass has ended."""
        self._stop += max(bytes_max, 1)
        if self._how == GOES_ON:
            try:
                next(self._pass)
            except StopIteration:
                self._how = IS_DONE
            except _EndError as error:
                self._how = error.how
        return self._how

    def places(self, number: int, /) -> Sequence[ValuePlace]:
        """Return the places of the path with this number. Call it after IS_DONE."""
        found: list[ValuePlace] = []
        for place in self._found[number]:
            if place is None:
                break
            found.append(place)
        return found

    def _document(self) -> Generator[None, None, None]:
        at = self._white(0)
        while True:
            while at >= self._stop:
                yield
            byte = self._text[at : at + 1]
            self._begin(at)
            if byte in {b"[", b"{"}:
                self._open(is_object=byte == b"{")
                at = self._white(at + 1)
                if self._text[at : at + 1] not in {b"]", b"}"}:
                    if byte == b"{":
                        at = yield from self._name(at)
                    continue
            else:
                at = yield from self._plain(at, byte)
                self._end_plain(at)
                at = self._white(at)
            while len(self._levels) > 1:
                level, byte = self._levels[-1], self._text[at : at + 1]
                at += 1
                if byte == b",":
                    at = self._white(at)
                    if level.is_object:
                        at = yield from self._name(at)
                    break
                if byte != (b"}" if level.is_object else b"]"):
                    raise _EndError(IS_UNSOUND)
                self._close(at)
                at = self._white(at)
                while at >= self._stop and at < len(self._text):
                    yield
            else:
                if at < len(self._text):
                    raise _EndError(IS_UNSOUND)
                return

    def _white(self, at: int) -> int:
        match = _WHITE.match(self._text, at)
        assert match is not None, "it matches nothing, too"
        return match.end()

    def _plain(self, at: int, byte: Text) -> Generator[None, None, int]:
        """Return the end of a value that is no container."""
        if byte == b'"':
            return (yield from self._string(at))
        match = (_LITERAL if byte in {b"t", b"f", b"n"} else _NUMBER).match(self._text, at)
        if match is None:
            raise _EndError(IS_UNSOUND)
        return match.end()

    def _string(self, begin: int) -> Generator[None, None, int]:
        """Return the end of a string, behind its closing quote."""
        text, at = self._text, begin + 1
        while True:
            while at >= self._stop and at < len(text):
                yield
            match = _CHARACTERS.match(text, at, at + _PIECE_BYTES)
            assert match is not None, "it matches nothing, too"
            if match.end() == at or match.end() == len(text):
                break
            at = match.end()
        if text[at : at + 1] != b'"':
            # A piece that ends within an escape goes on with it, so here is none.
            raise _EndError(IS_UNSOUND)
        body = bytes(text[begin + 1 : at])
        if b"\\u" in body and any(found.group(1) for found in _SURROGATES.finditer(body)):
            raise _EndError(IS_UNSOUND)
        if self._checks_utf8:
            try:
                body.decode()
            except UnicodeDecodeError as error:
                raise _EndError(IS_UNSOUND) from error
        return at + 1

    def _name(self, at: int) -> Generator[None, None, int]:
        """Return where the value of the member begins whose name stands here."""
        if self._text[at : at + 1] != b'"':
            raise _EndError(IS_UNSOUND)
        end = yield from self._string(at)
        level = self._levels[-1]
        level.child_name_at = at
        level.child = self._leading_on(bytes(self._text[at:end])) if level.paths else level.paths
        at = self._white(end)
        if self._text[at : at + 1] != b":":
            raise _EndError(IS_UNSOUND)
        return self._white(at + 1)

    def _leading_on(self, quoted: bytes) -> frozenset[int]:
        name = _unescaped(quoted) if b"\\" in quoted else quoted[1:-1]
        length = len(self._levels) - 2
        return frozenset(
            number for number in self._levels[-1].paths
            if len(self._paths[number]) > length and self._paths[number][length] == name
        )  # fmt: skip

    def _begin(self, at: int) -> None:
        """A value begins."""
        level, length = self._levels[-1], len(self._levels) - 2
        level.child_at = at
        if length < 0:
            level.child = level.paths
        elif level.paths and not level.is_object:
            level.child = frozenset(
                number for number in level.paths
                if len(self._paths[number]) > length
                and self._paths[number][length] in {level.count, -1}
            )  # fmt: skip
        for number in level.child:
            self._found[number] = [None] * len(self._found[number])

    def _end(self, end: int, inner: _Level | None) -> None:
        """A value ends."""
        level, length = self._levels[-1], len(self._levels) - 1
        level.count += 1
        for number in level.child:
            self._found[number][length] = ValuePlace(
                level.child_at, end, level.child_name_at,
                0 if inner is None else inner.count,
                inner is not None and inner.has_containers,
                inner is not None and number in inner.wanted_found,
            )  # fmt: skip

    def _end_plain(self, end: int) -> None:
        level, length = self._levels[-1], len(self._levels) - 2
        if level.paths and not level.is_object:
            value = self._text[level.child_at : end]
            level.wanted_found.update(
                number for number in level.paths
                if len(self._paths[number]) == length and self._wanted[number] == value
            )  # fmt: skip
        self._end(end, None)

    def _open(self, *, is_object: bool) -> None:
        if self._levels_max < len(self._levels):
            raise _EndError(IS_TOO_DEEP)
        outer = self._levels[-1]
        outer.has_containers = True
        self._levels.append(_Level(is_object, outer.child))
        self.depth = max(self.depth, len(self._levels) - 1)

    def _close(self, end: int) -> None:
        self._end(end, self._levels.pop())


def _unescaped(quoted: bytes) -> bytes:
    """Return a sound name without its quotes and escapes; it need not be UTF-8."""
    name: str = json.loads(quoted.decode("utf-8", "surrogateescape"))
    return name.encode("utf-8", "surrogateescape")


_SCAN: Final = json_scan_loop() or PlainScan
STEP_BYTES: Final = 2 * 1024 if _SCAN is PlainScan else 256 * 1024
"""Bytes of a step: up to 2 ms, if each value has one digit."""
INLINE_BYTES: Final = 16 * 1024 if _SCAN is PlainScan else 128 * 1024
"""A text up to this is looked at in one go: with the loop in C within 1 ms."""
