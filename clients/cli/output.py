"""The output of dcpctl: plain lines, JSON lines, tables.

The JSON format is stable. Every line is one object with `"v": 1`. If the meaning of a field ever
changes, the number changes. 64-bit identifiers (`cas`, `vb_uuid`) are decimal strings, because many
JSON readers round numbers above 2^53. A key or value that is not UTF-8 is base64, marked with
`key_encoding` or `value_encoding` = "base64".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

SCHEMA_VERSION: Final = 1


def is_terminal() -> bool:
    """Whether stdout is a terminal, not a pipe or file."""
    return sys.stdout.isatty()


def text_fields(name: str, raw: bytes) -> dict[str, str]:
    """Return the JSON fields of a key or value: text, or base64 with its encoding field."""
    try:
        return {name: raw.decode()}
    except UnicodeDecodeError:
        from base64 import b64encode

        return {name: b64encode(raw).decode(), f"{name}_encoding": "base64"}


def shown(raw: bytes) -> str:
    """Return bytes as printable text in one line; other characters are escaped."""
    text = raw.decode(errors="backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def write_raw(data: bytes) -> None:
    """Write bytes to stdout as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_json(document: dict[str, Any]) -> None:
    """Write one JSON line."""
    import json

    line = json.dumps({"v": SCHEMA_VERSION, **document}, ensure_ascii=False)
    write_raw(line.encode() + b"\n")


def write_rows(
    mode: str, columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[Any]]
) -> None:
    """Write rows as a table, tab-separated lines or JSON lines.

    `columns`: (JSON name, table heading).
    """
    if mode == "json":
        for row in rows:
            write_json({name: value for (name, _), value in zip(columns, row, strict=True)})
    elif mode == "table":
        _write_table([heading for _, heading in columns], rows)
    else:
        lines = ("\t".join(map(str, row)) + "\n" for row in rows)
        write_raw("".join(lines).encode())


def _write_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console(file=sys.stdout, highlight=False, markup=False).print(table)
