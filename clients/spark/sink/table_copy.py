"""The documents of a table that `apply_changes` keeps, for a comparison by hashes. No Spark."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from struct import Struct
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from clients.errors import DcpdError
from clients.kv.differences import RowsCopy
from clients.spark.sink.parquet import MANIFEST, files_of
from vbucket.native.key_hashes import Row, RowForm

DEFAULT_COLLECTION: Final = "_default._default"
_VERSION: Final = Struct(">QQ")
"""CAS and revision."""
_FORM: Final = RowForm(0, b"", 0, 8)
_COLUMNS: Final = ("vb", "key", "cas", "revision")


def has_documents(path: str) -> bool:
    """Whether there is a table at a path, with documents. Raises DcpdError if it cannot be read."""
    if "://" in path or (Path(path) / "current" / "_delta_log").is_dir():
        from clients.spark.sink.delta import has_table

        return has_table(path)
    return (Path(path) / MANIFEST).is_file() and bool(files_of(Path(path), "current"))


def versions_in(
    path: str, as_of: int | None = None, vb_ids: Collection[int] | None = None
) -> pa.Table:
    """Return partition, key, CAS, revision, and the collection if there is one, of the documents of
    a table. `vb_ids`: of these partitions only. Raises DcpdError.
    """
    some = None if vb_ids is None else pc.field("vb").isin(list(vb_ids))
    if "://" in path or (Path(path) / "current" / "_delta_log").is_dir():
        from clients.spark.sink.delta import rows_of

        rows = rows_of(path, "current", {}, as_of)
        rows = rows if some is None else rows.filter(some)
    else:
        files = files_of(Path(path).absolute(), "current", as_of)
        if not files:
            raise DcpdError(f"the table at {path} has no documents yet")
        names = pq.read_schema(files[0]).names
        columns = [name for name in (*_COLUMNS, "collection") if name in names]
        rows = pa.concat_tables(
            pq.read_table(file, columns=columns, filters=some, partitioning=None) for file in files
        )
    return rows.select([*_COLUMNS, *({"collection"} & {*rows.column_names})])


class TableCopy(RowsCopy):
    """A table, as of when it is opened, or as of a cut that it has kept. Only keys, CAS and
    revisions are read.
    """

    def __init__(self, path: str, as_of: int | None = None) -> None:
        """Raises DcpdError, also if the table has not kept the cut."""
        super().__init__(path if as_of is None else f"{path}@{as_of}", 0, _FORM)
        rows = versions_in(path, as_of)
        has_collections = "collection" in rows.column_names
        self._only = None if has_collections else 0
        """The collection of all rows, which is the default one; None: each row says its own."""
        self._rows = rows.sort_by("vb")
        self._take(self._rows)
        self._ids = {"0x0": 0}
        if has_collections:  # the table does not have the numbers of others
            names = rows["collection"].unique().to_pylist()
            self._ids = {
                name: 0 if name == DEFAULT_COLLECTION else -1 - at
                for at, name in enumerate(sorted(names))
            }
        self.partitions_seen = 1 + (pc.max(rows["vb"]).as_py() or 0)

    async def close(self) -> None:
        """Nothing is open."""

    async def collections(self) -> dict[str, int]:
        """Return the collections that it has documents of: scope.collection -> a number."""
        return self._ids

    @property
    def only_collection(self) -> int | None:
        """See Copy."""
        return self._only

    def select(self, collection_id: int) -> None:
        """Read a collection of `collections`."""
        if self._only is None:
            name = next(name for name, number in self._ids.items() if number == collection_id)
            self._take(self._rows.filter(pc.equal(self._rows["collection"], name)))

    def _take(self, rows: pa.Table) -> None:
        self._selected, self._vbs = rows, rows["vb"].to_numpy()

    def rows(self, vb_id: int) -> list[Row]:
        """See RowsCopy."""
        first, stop = (self._vbs.searchsorted(vb_id, side) for side in ("left", "right"))
        some: Any = self._selected.slice(first, stop - first)
        keys = some["key"].cast(pa.binary()).to_pylist()
        versions = zip(some["cas"].to_pylist(), some["revision"].to_pylist(), strict=True)
        return [(key, _VERSION.pack(*version)) for key, version in zip(keys, versions, strict=True)]
