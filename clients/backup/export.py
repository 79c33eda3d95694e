"""Export: an archive as of a point, as JSON lines or Parquet.

    JSON lines   one document per line: {"v":1, "collection", "key", "value", "vb", "seqno", "rev",
                 "cas", "flags", "expiry"}. `cas` is decimal text. Bytes that are not UTF-8 are
                 base64, marked with "key_encoding" or "value_encoding". "xattrs" (name: JSON value)
                 is there if the document has any
    Parquet      the same columns, `datatype` and `xattrs` (JSON text); key and value are binary,
                 cas is uint64

Deletions are not exported. Memory holds one batch of rows and the keys of one partition.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Final, NamedTuple

from clients.backup.archives.archive import Archive
from clients.backup.archives.archive_errors import MissingExtraError
from clients.backup.archives.place import Place, io_error
from clients.backup.archives.point import Point
from clients.backup.reading import Damage, Findings, PointReader
from clients.backup.selection import Routes, Selection, split_key
from dcp.wire.frame import HEADER, HEADER_BYTES
from dcp.wire.message import MUTATION_EXTRAS
from dcp.wire.opcode import Opcode
from dcp.wire.xattrs import DATATYPE_XATTR, body_of, section_of, unpack_xattrs, xattrs_text

SCHEMA_VERSION: Final = 1
ROWS_MAX: Final = 10_000
ROW_BYTES_MAX: Final = 16 * 1024 * 1024
"""A row group is written when it has this many rows or bytes."""


class ExportRow(NamedTuple):
    """A document."""

    collection: str
    key: bytes
    value: bytes
    vb: int
    seqno: int
    rev: int
    cas: int
    flags: int
    expiry: int
    """Absolute Unix seconds, 0 = never."""
    datatype: int
    xattrs: str | None = None
    """JSON object; None: the document has no XATTRs."""


class ExportReport(NamedTuple):
    """The result of an export."""

    documents: int
    value_bytes: int
    earlier: dict[int, tuple[int, int]]
    damages: list[Damage]
    broken: dict[str, str]
    """Manifests of runs that could not be used (`salvage`), and why."""


class Export:
    """One export. Raises BackupErrors if the archive lacks the point or the selection."""

    def __init__(
        self,
        archive: Archive,
        point: Point,
        selection: Selection,
        *,
        salvage: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._runs, self._broken = archive.runs_and_losses_of(point, salvage=salvage)
        self._point = point
        self._vb_ids = sorted({vb_id for record in self._runs for vb_id in record.legs})
        point.check_partitions(self._vb_ids)
        self._routes = Routes(selection, self._runs)
        self._prefix = selection.prefix
        self._reader = PointReader(archive, self._runs, salvage=salvage)
        self._on_progress = on_progress or (lambda _done, _total: None)
        self._url = archive.url
        self.findings = Findings()
        self._documents = self._value_bytes = 0

    def rows(self) -> Iterator[ExportRow]:
        """Yield the documents, partition by partition, in seqno order."""
        for index, vb_id in enumerate(self._vb_ids):
            view = self._reader.view(vb_id, self._point)
            self.findings.take(view)
            for data, start, stop in self._reader.frames(view):
                row = self._row(data, start, stop)
                if row is not None:
                    self._documents += 1
                    self._value_bytes += len(row.value)
                    yield row
            self._on_progress(index + 1, len(self._vb_ids))
        self.findings.check(self._url)

    def to_json_lines(self, file: IO[bytes]) -> ExportReport:
        """Write one JSON object per line."""
        lines: list[bytes] = []
        for row in self.rows():
            lines.append(json_line(row))
            if len(lines) >= ROWS_MAX:
                file.write(b"".join(lines))
                lines.clear()
        file.write(b"".join(lines))
        return self._report()

    def to_parquet(self, file: IO[bytes]) -> ExportReport:
        """Write a Parquet file. Raises MissingExtraError."""
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError:
            raise MissingExtraError("pyarrow, which writes Parquet, is not installed") from None
        types = {
            "collection": pa.dictionary(pa.int32(), pa.string()), "key": pa.binary(),
            "value": pa.binary(), "vb": pa.uint16(), "seqno": pa.uint64(), "rev": pa.uint64(),
            "cas": pa.uint64(), "flags": pa.uint32(), "expiry": pa.uint32(),
            "datatype": pa.uint8(), "xattrs": pa.string(),
        }  # fmt: skip
        schema = pa.schema(list(types.items()))
        rows: list[ExportRow] = []
        size = 0
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:

            def write() -> None:
                columns = zip(*rows, strict=True)
                arrays = [
                    pa.array(column, type=kind)
                    for column, kind in zip(columns, types.values(), strict=True)
                ]
                writer.write_table(pa.table(arrays, schema=schema))
                rows.clear()

            for row in self.rows():
                rows.append(row)
                size += len(row.value)
                if len(rows) >= ROWS_MAX or size >= ROW_BYTES_MAX:
                    write()
                    size = 0
            if rows:
                write()
        return self._report()

    def _row(self, data: bytes, start: int, stop: int) -> ExportRow | None:
        _, opcode, key_len, extras_len, datatype, vb_id, _, _, cas = HEADER.unpack_from(data, start)
        if opcode != Opcode.DCP_MUTATION:
            return None
        seqno, rev, flags, expiry, _, _, _ = MUTATION_EXTRAS.unpack_from(data, start + HEADER_BYTES)
        key_at = start + HEADER_BYTES + extras_len
        collection_id, key = split_key(data[key_at : key_at + key_len])
        path = self._routes.source(collection_id)
        if path is None or not key.startswith(self._prefix):
            return None
        value, xattrs = data[key_at + key_len : stop], None
        if datatype & DATATYPE_XATTR:
            xattrs = xattrs_text(unpack_xattrs(section_of(value, datatype)))
            value, datatype = body_of(value, datatype), datatype & ~DATATYPE_XATTR
        return ExportRow(path, key, value, vb_id, seqno, rev, cas, flags, expiry, datatype, xattrs)

    def _report(self) -> ExportReport:
        found = self.findings
        return ExportReport(
            self._documents, self._value_bytes, found.earlier, found.damages, self._broken
        )


def json_line(row: ExportRow) -> bytes:
    """Return a row as a JSON line; see the module."""
    document: dict[str, Any] = {"v": SCHEMA_VERSION, "collection": row.collection}
    for name, raw in (("key", row.key), ("value", row.value)):
        try:
            document[name] = raw.decode()
        except UnicodeDecodeError:
            document[name] = b64encode(raw).decode()
            document[f"{name}_encoding"] = "base64"
    document |= {
        "vb": row.vb, "seqno": row.seqno, "rev": row.rev, "cas": str(row.cas), "flags": row.flags,
        "expiry": row.expiry,
    }  # fmt: skip
    line = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    if row.xattrs is not None:
        line = f'{line[:-1]},"xattrs":{row.xattrs}}}'  # numbers keep their text
    return line.encode() + b"\n"


@contextmanager
def open_target(url: str) -> Iterator[IO[bytes]]:
    """Open a path or fsspec URL for an export. The file appears when it is complete.

    Raises BackupErrors.
    """
    place = Place.of(url)
    try:
        with place.open_whole() as file:
            yield file
    except OSError as error:
        raise io_error(url, "it cannot be written", error) from error
