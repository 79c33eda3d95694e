"""The output of dcpctl: plain lines, JSON lines, tables.

The JSON format is stable. Every line is one object with `"v": 1`. If the meaning of a field ever
changes, the number changes. 64-bit identifiers (`cas`, `vb_uuid`) are decimal strings, because many
JSON readers round numbers above 2^53. A key or value that is not UTF-8 is base64, marked with
`key_encoding` or `value_encoding` = "base64". A value that is a JSON object or array is JSON,
marked with `value_encoding` = "json"; --value string and --value base64 choose otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

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


ValueStyle = Literal["json", "string", "base64"]
"""How a value stands in JSON; see `value_fields`."""
VALUE_STYLES: Final = ("json", "string", "base64")
TABLE_WIDTH: Final = 80
"""Columns of a table that is not written to a terminal."""


def value_fields(raw: bytes, style: ValueStyle) -> dict[str, Any]:
    """Return the JSON fields of a value, for msgspec's encoder.

    "json": an object or array is JSON, with all digits of its numbers; other values are as with
    "string": text, or base64 if they are not UTF-8. "base64": always base64. A value that is a
    number or a word stays text, so "7" and 7 in a document are not taken for each other.
    """
    from base64 import b64encode

    if style == "base64":
        return {"value": b64encode(raw).decode(), "value_encoding": "base64"}
    if style == "json" and raw.lstrip(b" \t\r\n")[:1] in {b"{", b"["}:
        import msgspec

        try:
            raw.decode()
            in_one_line = msgspec.json.format(raw, indent=-1)
        except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
            pass
        else:
            return {"value": msgspec.Raw(in_one_line), "value_encoding": "json"}
    return text_fields("value", raw)


def table_width() -> int:
    """Return the columns that a table may fill: those of the terminal, 80 without one."""
    import shutil

    return shutil.get_terminal_size((TABLE_WIDTH, 24)).columns if is_terminal() else TABLE_WIDTH


def cut_to_width(line: str, width: int) -> str:
    """Return a line that fills at most so many columns; a longer one ends in an ellipsis."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(line) <= width:
        return line
    return set_cell_size(line, width - 1).rstrip() + "…"


def shown(raw: bytes) -> str:
    """Return bytes as printable text in one line; other characters are escaped."""
    return shown_text(raw.decode(errors="backslashreplace"))


def shown_text(text: str) -> str:
    """Return a text in one line; escape what is not printable, such as ESC, tabs and newlines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def write_raw(data: bytes) -> None:
    """Write bytes to stdout as they are."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_json(document: dict[str, Any]) -> None:
    """Write one JSON line. A value of `value_fields` may be in it."""
    if document.get("value_encoding") == "json":
        import msgspec

        line = msgspec.json.encode({"v": SCHEMA_VERSION, **document})
    else:
        import json

        line = json.dumps({"v": SCHEMA_VERSION, **document}, ensure_ascii=False).encode()
    write_raw(line + b"\n")


def write_rows(
    mode: str,
    columns: Sequence[tuple[str, str]],
    rows: Iterable[Sequence[Any]],
    *,
    has_header: bool = True,
) -> None:
    """Write rows as a table, tab-separated lines or JSON lines.

    `columns`: (JSON name, table heading). The header of lines has the JSON names, which are stable.
    There is none for rows of a name and a value, whose headings are empty, and none in "raw".
    Tables and lines show cells with `shown_text`, because names come from other programs and could
    control the terminal or fake a row.
    """
    has_header = has_header and any(heading for _, heading in columns)
    if mode == "json":
        for row in rows:
            write_json({name: value for (name, _), value in zip(columns, row, strict=True)})
    elif mode == "table":
        _write_table([heading for _, heading in columns], rows, has_header=has_header)
    else:
        header = [[name for name, _ in columns]] if has_header and mode != "raw" else []
        lines = ("\t".join(map(_cell, row)) + "\n" for row in (*header, *rows))
        write_raw("".join(lines).encode())


def _cell(value: Any) -> str:
    return shown_text(str(value))


def _write_table(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], *, has_header: bool
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", show_header=has_header)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*map(_cell, row))
    Console(file=sys.stdout, highlight=False, markup=False, width=table_width()).print(table)
