"""dcpctl import: load a CSV or JSON lines file.

Each row becomes one document: a JSON object with its columns. One column holds the key. The
asyncio client sends the rows in batches, and reads the next batch while the server stores the last.
"""

from __future__ import annotations

import asyncio
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import click
import msgspec

from clients.cli.dcpctl import EXIT_PARTIAL, Target, complain, help_text, with_target
from clients.cli.output import write_json, write_raw
from clients.errors import DcpdError
from clients.kv.client import KvClient
from clients.operation import Operation, store_operation
from dcp.wire.opcode import Opcode

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BATCH_ROWS: Final = 4096


class ImportFileError(DcpdError):
    """The file cannot be loaded. The text names the line and the reason."""


@click.command(
    "import",
    help=help_text(
        "Load a file. Each row becomes a JSON document; one column holds the key. If a key occurs"
        " again, the later row replaces the earlier one.",
        "dcpctl import flights.csv --key tailnum",
        "dcpctl import users.jsonl --key id --prefix user:",
    ),
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--key", "column", required=True, metavar="COLUMN", help="Column with the key.")
@click.option("--prefix", default="", metavar="TEXT", help="Prefix of every key.")
@click.option("--skip-empty", is_flag=True, help="Skip rows with an empty key.")
@with_target
def import_(*, target: Target, file: Path, column: str, prefix: str, skip_empty: bool) -> int:
    """Load a CSV or JSON lines file."""
    rows = _READERS.get(file.suffix.lower())
    if rows is None:
        raise click.UsageError(
            f"{file}: unknown format. The file name must end in one of {', '.join(_READERS)}"
        )
    loader = _Loader(target, file, column, prefix, skips_empty=skip_empty)
    try:
        asyncio.run(loader.run())
    except DcpdError as error:
        if not loader.stored:
            raise
        error.hint = f"{loader.stored} rows are stored. Run the command again; that is safe."
        complain(error)
        return EXIT_PARTIAL
    summary = {"file": str(file), "stored": loader.stored, "skipped": loader.skipped}
    if target.output_or("plain") == "json":
        write_json(summary)
    else:
        skipped = f", {loader.skipped} skipped" if loader.skipped else ""
        write_raw(f"stored {loader.stored} rows of {file.name}{skipped}\n".encode())
    return 0


class _Loader:
    """One import: reads, batches, counts."""

    def __init__(
        self, target: Target, file: Path, column: str, prefix: str, *, skips_empty: bool
    ) -> None:
        self.stored = 0
        self.skipped = 0
        self._target = target
        self._file = file
        self._column = column
        self._prefix = prefix
        self._skips_empty = skips_empty

    async def run(self) -> None:
        """Load the file, with a progress bar if stderr is a terminal."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[rows]} rows"), TimeRemainingColumn(),
            console=Console(file=sys.stderr), disable=not sys.stderr.isatty(),
        )  # fmt: skip
        async with KvClient.connect(
            self._target.address, timeout_s=max(self._target.timeout_s, 30.0)
        ) as kv:
            with progress, self._file.open("rb") as file:
                bar = progress.add_task(
                    self._file.name, total=self._file.stat().st_size or None, rows=0
                )
                await self._load(kv, file, progress, bar)

    async def _load(self, kv: KvClient, file: IO[bytes], progress: Progress, bar: TaskID) -> None:
        under_way: asyncio.Task[list[Any]] | None = None
        try:
            for batch in self._batches(file):
                if under_way is not None:
                    self._count(await under_way)
                    progress.update(bar, completed=file.tell(), rows=self.stored)
                under_way = asyncio.create_task(kv.execute(batch))
                await asyncio.sleep(0)  # send this batch before reading the next one
        finally:
            if under_way is not None:
                self._count(await under_way)
                progress.update(bar, completed=file.tell(), rows=self.stored)

    def _count(self, outcomes: list[Any]) -> None:
        """Count what was stored. Raises the first error."""
        errors = [outcome for outcome in outcomes if isinstance(outcome, DcpdError)]
        self.stored += len(outcomes) - len(errors)
        if errors:
            raise errors[0]

    def _batches(self, file: IO[bytes]) -> Iterator[list[Operation]]:
        """Yield SETs in batches. Raises ImportFileError."""
        batch: list[Operation] = []
        encode = msgspec.json.Encoder().encode
        for line_number, row in _READERS[self._file.suffix.lower()](file, self._file):
            key = row.get(self._column)
            if key is None and self._column not in row:
                raise ImportFileError(
                    f"{self._file}, line {line_number}: there is no column {self._column!r}",
                    hint=f"Its columns are: {', '.join(map(str, row))}",
                )
            if key in {None, ""} and self._skips_empty:
                self.skipped += 1
                continue
            try:
                full_key = self._prefix + ("" if key is None else str(key))
                batch.append(store_operation(Opcode.SET, full_key, encode(row)))
            except ValueError as error:
                raise ImportFileError(
                    f"{self._file}, line {line_number}: {error}",
                    hint="Use --skip-empty to skip rows without a key.",
                ) from error
            if len(batch) == BATCH_ROWS:
                yield batch
                batch = []
        if batch:
            yield batch


def _csv_rows(file: IO[bytes], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, row) of a CSV file with a header."""
    reader = csv.DictReader(_text_lines(file, path))
    for row in reader:
        if None in row or None in row.values():
            raise ImportFileError(
                f"{path}, line {reader.line_num}: the number of fields differs from the header"
            )
        yield reader.line_num, row


def _text_lines(file: IO[bytes], path: Path) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ImportFileError(f"{path}, line {number}: not UTF-8 ({error.reason})") from error


def _json_rows(file: IO[bytes], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) of a JSON lines file; skip empty lines."""
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield number, decode(line)
        except msgspec.MsgspecError as error:
            raise ImportFileError(f"{path}, line {number}: {error}") from error


_READERS: Final = {".csv": _csv_rows, ".jsonl": _json_rows, ".ndjson": _json_rows}
