"""The options of the source: a table of names, accepted values and parsers. Pure.

Spark passes options as text; names are not case-sensitive. An unknown name or a bad value raises
`OptionError`, which names the option and its accepted values.

The option valueSchema is a list of columns in Spark's DDL:

    carrier STRING, flight INT, at STRUCT<airport: STRING, gate INT>, tags ARRAY<STRING>

Spark's own parser would report a position inside `STRUCT<...>`, not the option. Only what a JSON
document can provide is allowed: no NOT NULL (a member may be missing), and only text as map keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from clients.address import ServerAddress, parse_address
from clients.spark.offset import NO_PARTITIONS, Offset, decode, partition_number
from vbucket.model.ids import SEQNO_MAX

NUM_PARTITIONS: Final = 4
"""Tasks of a batch, if there is enough to read. One server can feed about this many readers."""
NUM_PARTITIONS_MAX: Final = 1024
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


class OptionError(ValueError):
    """An option of the source is wrong. The text names it and its accepted values."""


@dataclass(frozen=True)
class SourceSettings:
    """The parsed options. They are pickled for the executors."""

    servers: tuple[ServerAddress, ...] = field(repr=False)
    """Contains passwords, so it is not part of the repr, which Spark may log."""
    collections: tuple[str, ...] | None = None
    """scope.collection; None: the default collection, without a column `collection`."""
    partitions: tuple[int, ...] | None = None
    """None: all of the server."""
    starting: str | Offset | int = "earliest"
    """`earliest`, `latest`, an offset, or a time in ns since the Unix epoch."""
    rows_max: int | None = None
    bytes_max: int | None = None
    num_partitions: int = NUM_PARTITIONS
    fails_on_rollback: bool = False
    history: bool = True
    value_format: str = "binary"
    value_schema: str = ""
    key_format: str = "binary"
    xattrs: bool = False
    from_replicas: bool = False
    consistent: bool = False
    """Batches end at consistent cuts."""
    table: str = ""
    """The table that the query keeps with `apply_changes`; "": none to compare with."""

    @property
    def schema(self) -> str:
        """The columns in Spark's DDL."""
        value = {
            "binary": "BINARY",
            "string": "STRING",
            "json": f"STRUCT<{self.value_schema}>",
        }[self.value_format]
        columns = [
            "vb INT", "seqno BIGINT", "vb_uuid BIGINT", "op STRING",
            f"key {self.key_format.upper()}", f"value {value}", "cas BIGINT", "revision BIGINT",
            "flags BIGINT", "expiry TIMESTAMP", "time TIMESTAMP",
        ]  # fmt: skip
        if self.collections is not None:
            columns.append("collection STRING")
        if self.xattrs:
            columns.append("xattrs STRING")
        return ", ".join(columns)


def parse_options(options: Mapping[str, str], *, is_batch: bool = False) -> SourceSettings:
    """Parse options. Raises OptionError."""
    given = {name.lower(): str(value).strip() for name, value in options.items()}
    known = {name.lower(): name for name in _OPTIONS}
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            meant = f"did you mean {known[near[0]]}? " if near else ""
            raise OptionError(f"option {name!r} is unknown: {meant}there are {', '.join(_OPTIONS)}")
    found: dict[str, Any] = {}
    for name, (takes, parse) in _OPTIONS.items():
        text = given.get(name.lower())
        if text is None:
            continue
        try:
            found[name] = parse(text)
        except ValueError as error:
            raise OptionError(
                f"option {name} takes {takes}, not {_shown(name, text, error)}"
            ) from None
    return _settings(found, is_batch=is_batch)


def _shown(name: str, text: str, error: ValueError) -> str:
    """Return a wrong value and the reason. A value with a password is hidden.

    Spark writes the text to its logs.
    """
    if name == "password" or (name == "servers" and "@" in text):
        return "this value (hidden because it contains a password)"
    return f"{text!r} ({error})" if str(error) else repr(text)


def _settings(found: dict[str, Any], *, is_batch: bool) -> SourceSettings:
    """Combine the parsed options, and check those that depend on each other."""
    if "servers" not in found:
        raise OptionError(f"option servers is missing: it takes {_OPTIONS['servers'][0]}")
    value_format, value_schema = found.get("valueFormat", "binary"), found.get("valueSchema", "")
    if (value_format == "json") != bool(value_schema):
        raise OptionError(
            "options valueFormat and valueSchema: valueFormat=json needs a valueSchema, other"
            " formats take none; for example valueSchema='carrier STRING, flight INT'"
        )
    if is_batch and ("maxRowsPerTrigger" in found or "maxBytesPerTrigger" in found):
        raise OptionError(
            "options maxRowsPerTrigger and maxBytesPerTrigger work with streams only: spark.read"
            " reads everything up to now"
        )
    if found.get("consistent"):
        _check_consistent(found)
    if found.get("table"):
        _check_table(found, is_batch=is_batch)
    defaults = SourceSettings(())
    if "partitions" in found:
        _check_start(found.get("startingOffsets"), found["partitions"])
    return SourceSettings(
        servers=_servers(found),
        collections=found.get("collections"),
        partitions=found.get("partitions", defaults.partitions),
        starting=found.get("startingOffsets", defaults.starting),
        rows_max=found.get("maxRowsPerTrigger"),
        bytes_max=found.get("maxBytesPerTrigger"),
        num_partitions=found.get("numPartitions", NUM_PARTITIONS),
        fails_on_rollback=found.get("onRollback") == "fail",
        history=found.get("history", True),
        xattrs=found.get("xattrs", False),
        from_replicas=found.get("fromReplicas", False),
        consistent=found.get("consistent", False),
        table=found.get("table", ""),
        value_format=value_format,
        value_schema=value_schema,
        key_format=found.get("keyFormat", "binary"),
    )


def _check_consistent(found: Mapping[str, Any]) -> None:
    """Refuse what a batch that ends at a cut cannot have."""
    limits = [name for name in ("maxRowsPerTrigger", "maxBytesPerTrigger") if name in found]
    if limits:
        raise OptionError(
            f"options consistent and {limits[0]}: a batch has all up to its cut, so it takes no"
            " limit; leave one of them out"
        )
    if found.get("fromReplicas"):
        raise OptionError(
            "options consistent and fromReplicas: only masters tell cuts; leave one of them out"
        )
    if found.get("startingOffsets", "earliest") != "earliest":
        raise OptionError(
            "options consistent and startingOffsets: only what begins at the earliest change is a"
            " state of the store; leave out startingOffsets"
        )


def _check_table(found: Mapping[str, Any], *, is_batch: bool) -> None:
    """Refuse what a query that compares with its table cannot have."""
    if is_batch:
        raise OptionError(
            "option table works with streams only: spark.read has no table that it keeps"
        )
    if found.get("xattrs"):
        raise OptionError(
            "options table and xattrs: documents that differ from the table come without XATTRs;"
            " leave one of them out"
        )
    if found.get("startingOffsets", "earliest") != "earliest":
        raise OptionError(
            "options table and startingOffsets: only a table that begins at the earliest change"
            " has all documents; leave out startingOffsets"
        )


def _check_start(starting: object, partitions: tuple[int, ...]) -> None:
    """Refuse a start in a partition that is not read: the query would never go there."""
    named = map(int, starting) if isinstance(starting, dict) else ()
    others = sorted(set(named) - set(partitions))
    if others:
        shown = ", ".join(map(str, others[:10])) + (", ..." if len(others) > 10 else "")
        raise OptionError(
            f"option startingOffsets names partitions that option partitions leaves out: {shown};"
            " leave them out here, too, or read them"
        )


def _servers(found: dict[str, Any]) -> tuple[ServerAddress, ...]:
    servers = []
    for server in found["servers"]:
        address: ServerAddress = server
        if "username" in found:
            address = address._replace(user=found["username"])
        if "password" in found:
            address = address._replace(password=found["password"])
        is_tls = found.get("tls", address.is_tls)
        if not is_tls and ("tlsCa" in found or "tlsCert" in found):
            raise OptionError("options tlsCa and tlsCert need TLS: set tls=true too")
        servers.append(
            address._replace(
                is_tls=is_tls,
                tls_ca=found.get("tlsCa", address.tls_ca),
                tls_cert=found.get("tlsCert", address.tls_cert),
            )
        )
    return tuple(servers)


def _addresses(text: str) -> tuple[ServerAddress, ...]:
    return tuple(parse_address(item) for item in _list(text))


def _list(text: str) -> tuple[str, ...]:
    items = tuple(item.strip() for item in text.split(","))
    if not all(items):
        raise ValueError("an item is empty")
    return items


def _collections(text: str) -> tuple[str, ...]:
    names = _list(text)
    for name in names:
        if name.count(".") != 1 or not all(name.split(".")):
            raise ValueError(f"{name!r} is not SCOPE.COLLECTION")
        if names.count(name) > 1:
            raise ValueError(f"{name} is named twice")
    return names


def _partitions(text: str) -> tuple[int, ...]:
    chosen: set[int] = set()
    for item in _list(text):
        first, dash, last = item.partition("-")
        low = partition_number(first.strip())
        high = partition_number(last.strip()) if dash else low
        if high < low:
            raise ValueError(f"{item!r} ends before it begins")
        chosen.update(range(low, high + 1))
    return tuple(sorted(chosen))


def _starting(text: str) -> str | Offset | int:
    if text in {"earliest", "latest"}:
        return text
    if text.startswith("{"):
        return _starting_offset(text)
    time_ns = _time_ns(text)
    if time_ns < 0:
        raise ValueError("it is before 1970, and no change is that old: use earliest")
    if time_ns > SEQNO_MAX:
        raise ValueError("it is after the year 2554, and no change can be that young")
    return time_ns


def _time_ns(text: str) -> int:
    """Return a time in ns since 1970."""
    if text.removeprefix("-").isdecimal() and text.isascii():
        return int(text) * 1_000_000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it is not one of these") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1000


def _starting_offset(text: str) -> Offset:
    members = json.loads(text, object_pairs_hook=tuple)  # its error is a ValueError
    offset: Offset = {}
    for name, item in members:
        if name in NO_PARTITIONS:
            continue  # it belongs to the query that the offset comes from
        vb_id = partition_number(name)
        if str(vb_id) in offset:
            raise ValueError(f"partition {vb_id} is named twice")
        if type(item) is int and 0 <= item <= SEQNO_MAX:
            offset[str(vb_id)] = str(item)
        elif isinstance(item, str):
            decode(item)
            offset[str(vb_id)] = item
        else:
            raise ValueError(f"partition {vb_id}: {item!r} is neither a seqno nor an offset text")
    return offset


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise ValueError
    return int(text)


def _tasks(text: str) -> int:
    count = _count(text)
    if count > NUM_PARTITIONS_MAX:
        raise ValueError
    return count


def _choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError
        return text.lower()

    return parse


def _boolean(text: str) -> bool:
    return _choice("true", "false")(text) == "true"


def _text(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


def _table(text: str) -> str:
    if "://" not in text and not Path(text).is_absolute():
        raise ValueError("executors have other working folders: name it from / on")
    return text.rstrip("/") if "://" in text else str(Path(text))


def _columns(text: str) -> str:
    check_columns(_text(text))
    return text


_OPTIONS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "servers": ("HOST:PORT or dcpd://HOST:PORT, several with commas", _addresses),
    "username": ("a user name", _text),
    "password": ("that user's password", _text),
    "tls": ("true or false", _boolean),
    "tlsCa": ("a PEM file with the CA to trust, on every executor", _text),
    "tlsCert": ("a PEM file with the client's certificate and key, on every executor", _text),
    "collections": ("names like SCOPE.COLLECTION, several with commas", _collections),
    "partitions": ("partitions and ranges of them, for example 0-511,600", _partitions),
    "startingOffsets": (
        (
            'earliest, latest, a JSON object of partitions and seqnos such as {"17": 120}, or a'
            " time: ISO 8601 (UTC if it has no zone) or milliseconds since 1970"
        ),
        _starting,
    ),
    "maxRowsPerTrigger": ("a number of rows, 1 or more", _count),
    "maxBytesPerTrigger": ("a number of bytes, 1 or more", _count),
    "numPartitions": (f"a number of tasks, 1 to {NUM_PARTITIONS_MAX}", _tasks),
    "onRollback": ("emit or fail", _choice("emit", "fail")),
    "history": ("true or false", _boolean),
    "valueFormat": ("binary, string or json", _choice("binary", "string", "json")),
    "valueSchema": (
        "the columns of a JSON value in Spark's DDL, for example carrier STRING, flight INT",
        _columns,
    ),
    "keyFormat": ("binary or string", _choice("binary", "string")),
    "xattrs": ("true or false", _boolean),
    "fromReplicas": ("true or false", _boolean),
    "consistent": ("true or false", _boolean),
    "table": ("the path of the table of apply_changes, absolute, or its URL", _table),
}
"""Name -> (description of the accepted values, parser)."""


def check_columns(text: str) -> None:
    """Check a list of columns. Raises ValueError, which says what is wrong."""
    parser = _ColumnParser(_TOKEN.findall(text))
    parser.columns(end="", depth=0)


class _ColumnParser:
    """A recursive-descent parser over the tokens of valueSchema."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def columns(self, end: str, depth: int) -> None:
        """Parse columns up to `end`; "" is the end of the text."""
        names: set[str] = set()
        while True:
            name = self._take()
            if not _NAME.fullmatch(name):
                raise ValueError(f"a column name is missing before {_token_shown(name)}")
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
                raise ValueError(f"a comma is missing before {_token_shown(following)}")

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
                f"{of}: {_token_shown(word)} is not a type; use {known}, STRUCT<...>, ARRAY<...> or"
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
            raise ValueError(f"{of}: {token!r} is missing before {_token_shown(found)}")


def _token_shown(token: str) -> str:
    return repr(token) if token else "the end"
