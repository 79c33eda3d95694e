"""dcpctl import: load CSV or JSON lines, from a file or a pipe.

Each row becomes one document: a JSON object with its columns. One column holds the key. The
asyncio client sends the rows in batches, and reads the next batch while the server stores the last.
"""

from __future__ import annotations

import asyncio
import csv
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click
import msgspec

from clients.cli.dcpctl import EXIT_PARTIAL, Target, complain, help_text, with_target
from clients.cli.output import shown_text, write_json, write_raw
from clients.cli.standard_input import standard_input
from clients.errors import DcpdError, TooBigError
from clients.kv.client import KvClient
from clients.operation import Operation, store_operation
from dcp.wire.frame import MAX_VALUE_BYTES
from dcp.wire.opcode import Opcode

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BATCH_ROWS: Final = 4096
FIELD_CHARS_MAX: Final = MAX_VALUE_BYTES
"""Longest field of a CSV file. A longer one would not fit into a document either."""


class ImportFileError(DcpdError):
    """The file cannot be loaded. The text names the line and the reason."""


@click.command(
    "import",
    help=help_text(
        "Load a file. Each row becomes a JSON document; one column holds the key. If a key occurs"
        " again, the later row replaces the earlier one.",
        "dcpctl import flights.csv --key tailnum",
        "dcpctl import users.jsonl --key id --prefix user:",
        "zcat orders.csv.gz | dcpctl import - --key id --collection shop.orders",
    ),
)
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
)
@click.option("--key", "column", required=True, metavar="COLUMN", help="Column with the key.")
@click.option("--prefix", default="", metavar="TEXT", help="Prefix of every key.")
@click.option("--collection", metavar="SCOPE.COLLECTION", help="Load into this collection.")
@click.option(
    "--format", "form", type=click.Choice(["csv", "jsonl"]),
    help="Default: from the file name; for - a first line with { means JSON lines.",
)  # fmt: skip
@click.option("--skip-empty", is_flag=True, help="Skip rows with an empty key.")
@with_target
def import_(
    *,
    target: Target,
    file: Path,
    column: str,
    prefix: str,
    collection: str | None,
    form: str | None,
    skip_empty: bool,
) -> int:
    """Load CSV or JSON lines."""
    _ = target.address  # With --password-file -, the password is the line before the rows.
    source = _Source(file)
    form = form or source.form()
    if form is None:
        raise click.UsageError(
            f"{file}: the name does not end in one of {', '.join(_FORMS)}. Add --format"
        )
    loader = _Loader(
        target, source, _READERS[form], column, prefix, collection, skips_empty=skip_empty
    )
    try:
        asyncio.run(loader.run())
    except DcpdError as error:
        if not loader.stored:
            raise
        error.hint = f"{loader.stored} rows are stored. Run the command again; that is safe."
        complain(error)
        return EXIT_PARTIAL
    summary = {"file": source.name, "stored": loader.stored, "skipped": loader.skipped}
    if target.output_or("plain") == "json":
        write_json(summary)
    else:
        skipped = f", {loader.skipped} skipped" if loader.skipped else ""
        write_raw(f"stored {loader.stored} rows of {source.short_name}{skipped}\n".encode())
    return 0


class _Source:
    """The lines of a file or of standard input, and how many bytes were read."""

    def __init__(self, path: Path) -> None:
        is_pipe = str(path) == "-"
        self.name = "standard input" if is_pipe else str(path)
        self.short_name = self.name if is_pipe else path.name
        self.bytes_read = 0
        self._path = path
        self._pipe: IO[bytes] | None = None
        self._blank_lines = 0
        self._first: list[bytes] = []
        if is_pipe:
            self.size_bytes = None
            self._pipe = standard_input()
        else:
            self.size_bytes = path.stat().st_size or None

    def form(self) -> str | None:
        """Return the format by the file's name, or by the first line of standard input that is not
        blank. Raises ImportFileError if that is a JSON array.
        """
        if self._pipe is None:
            return _FORMS.get(self._path.suffix.lower())
        line = self._pipe.readline().removeprefix(BOM_UTF8)
        while line and not line.strip():
            self._blank_lines += 1
            line = self._pipe.readline()
        self._first = [line]
        if line.lstrip().startswith(b"["):
            raise _json_array(self.name, self._blank_lines + 1)
        # Without a line there are no rows in either format. A CSV file would need a header.
        return "jsonl" if not line or line.lstrip().startswith(b"{") else "csv"

    def lines(self) -> Iterator[bytes]:
        """Yield the lines without a byte order mark; close the file at the end."""
        with self._pipe or self._path.open("rb") as file:
            read_before = chain(repeat(b"\n", self._blank_lines), self._first)
            for number, line in enumerate(chain(read_before, file)):
                self.bytes_read += len(line)
                yield line if number else line.removeprefix(BOM_UTF8)


class _Loader:
    """One import: reads, batches, counts."""

    def __init__(
        self,
        target: Target,
        source: _Source,
        read: Reader,
        column: str,
        prefix: str,
        collection: str | None,
        *,
        skips_empty: bool,
    ) -> None:
        self.stored = 0
        self.skipped = 0
        self._target = target
        self._source = source
        self._read = read
        self._column = column
        self._prefix = prefix
        self._collection = collection
        self._skips_empty = skips_empty

    async def run(self) -> None:
        """Load, with a progress bar if stderr is a terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rows]} rows"), TimeRemainingColumn(),
            console=Console(file=sys.stderr), disable=not sys.stderr.isatty(),
        )  # fmt: skip
        source = self._source
        async with KvClient.connect(
            self._target.address, timeout_s=max(self._target.timeout_s, 30.0)
        ) as kv:
            into = kv if self._collection is None else kv.collection(self._collection)
            with progress:
                bar = progress.add_task(source.short_name, total=source.size_bytes, rows=0)
                await self._load(into, progress, bar)

    async def _load(self, kv: KvClient, progress: Progress, bar: TaskID) -> None:
        under_way: asyncio.Task[list[Any]] | None = None
        try:
            for batch in self._batches():
                if under_way is not None:
                    self._count(await under_way)
                    progress.update(bar, completed=self._source.bytes_read, rows=self.stored)
                under_way = asyncio.create_task(kv.execute(batch))
                await asyncio.sleep(0)  # send this batch before reading the next one
        finally:
            if under_way is not None:
                self._count(await under_way)
                progress.update(bar, completed=self._source.bytes_read, rows=self.stored)

    def _count(self, outcomes: list[Any]) -> None:
        """Count what was stored. Raises the first error."""
        errors = [outcome for outcome in outcomes if isinstance(outcome, DcpdError)]
        self.stored += len(outcomes) - len(errors)
        if errors:
            raise errors[0]

    def _batches(self) -> Iterator[list[Operation]]:
        """Yield SETs in batches. Raises ImportFileError."""
        batch: list[Operation] = []
        encode = msgspec.json.Encoder().encode
        name = self._source.name
        for line_number, row in self._read(self._source.lines(), name, self._column):
            key = row.get(self._column)
            if key is None and self._column not in row:
                raise _no_column(name, line_number, self._column, row)
            if isinstance(key, bool) or not isinstance(key, str | int | float | None):
                raise ImportFileError(
                    f"{name}, line {line_number}: the key in {self._column!r} is"
                    f" {_JSON_NAMES[type(key)]}; a key is a text or a number"
                )
            if (key is None or key == "") and self._skips_empty:
                self.skipped += 1
                continue
            try:
                full_key = self._prefix + ("" if key is None else str(key))
                batch.append(store_operation(Opcode.SET, full_key, encode(row)))
            except TooBigError as error:
                raise ImportFileError(f"{name}, line {line_number}: {error}") from error
            except ValueError as error:
                raise ImportFileError(
                    f"{name}, line {line_number}: {error}",
                    hint="Use --skip-empty to skip rows without a key.",
                ) from error
            if len(batch) == BATCH_ROWS:
                yield batch
                batch = []
        if batch:
            yield batch


def _csv_rows(
    lines: Iterable[bytes], name: str, key_column: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of a CSV file with a header. Blank lines are skipped."""
    rows = _csv_fields(lines, name)
    number, header = next(rows, (1, []))
    if key_column not in header:
        raise _no_column(name, number, key_column, header)
    twice = sorted({column for column in header if header.count(column) > 1})
    if twice:
        raise ImportFileError(
            f"{name}, line {number}: two columns are named {twice[0]!r}, and a document has room"
            " for one of them",
            hint="Rename one of them in the header.",
        )
    for number, fields in rows:
        if len(fields) != len(header):
            raise ImportFileError(
                f"{name}, line {number}: the number of fields differs from the header"
            )
        yield number, dict(zip(header, fields, strict=True))


def _csv_fields(lines: Iterable[bytes], name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the last line, fields) of the header and the rows."""
    # The limit is one of the process. Python's own is 128 Ki.
    csv.field_size_limit(FIELD_CHARS_MAX)
    # Without `strict`, a quote that is not closed takes all lines after it into its field.
    reader = csv.reader(_text_lines(lines, name), strict=True)
    while True:
        first = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            last = max(first, reader.line_num)
            where = f"line {first}" if first == last else f"lines {first} to {last}"
            raise ImportFileError(
                f"{name}, {where}: not CSV: {error}",
                hint="Look for a quote that is not closed, or that is not doubled in a field.",
            ) from error
        if fields is None:
            return
        if len(fields) > 1 or "".join(fields).strip():
            yield reader.line_num, fields


def _text_lines(lines: Iterable[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise ImportFileError(f"{name}, line {number}: not UTF-8 ({error.reason})") from error


def _json_rows(
    lines: Iterable[bytes], name: str, _key_column: str
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSON lines file; skip empty lines."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if line.lstrip().startswith(b"["):
            raise _json_array(name, number)
        try:
            row = decode(line)
        except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, nested too deeply
            raise ImportFileError(f"{name}, line {number}: {error}") from error
        yield number, row


def _json_array(name: str, line_number: int) -> ImportFileError:
    return ImportFileError(
        f"{name}, line {line_number}: this is a JSON array, not JSON lines (one object per line)",
        hint="Use jq -c '.[]' to write its objects as lines, or add --format csv if it is CSV.",
    )


def _no_column(name: str, line_number: int, column: str, columns: Iterable[str]) -> ImportFileError:
    there = ", ".join(map(shown_text, columns))
    return ImportFileError(
        f"{name}, line {line_number}: there is no column {column!r}",
        hint=f"Its columns are: {there}" if there else "It has no columns.",
    )


Reader = Callable[[Iterable[bytes], str, str], Iterator[tuple[int, dict[str, Any]]]]
_READERS: Final[dict[str, Reader]] = {"csv": _csv_rows, "jsonl": _json_rows}
_FORMS: Final = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
"""Ending of a file name -> format."""
_JSON_NAMES: Final = {bool: "true or false", dict: "an object", list: "an array"}
