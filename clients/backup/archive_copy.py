"""The documents of an archive at the end of its newest run, for a comparison by hashes."""

from __future__ import annotations

from typing import Final

from clients.backup.archives.archive import open_archive
from clients.backup.archives.archive_errors import ArchiveDamagedError
from clients.backup.archives.point import Point
from clients.backup.reading import PointReader
from clients.kv.differences import RowsCopy
from dcp.wire.opcode import Opcode
from vbucket.model.entry import key_in_frame
from vbucket.model.manifest import encode_leb128
from vbucket.native.key_hashes import Row, RowForm

_HEAD: Final = slice(1, 40)
"""Of a stored frame: from its opcode to its revision."""
_CAS_AT: Final = 15
_REV_AT: Final = 31


def _form_of(collection_id: int) -> RowForm:
    return RowForm(0, encode_leb128(collection_id), _CAS_AT, _REV_AT, int(Opcode.DCP_MUTATION))


class ArchiveCopy(RowsCopy):
    """An archive. Every partition that is read is read from its files."""

    def __init__(self, url: str) -> None:
        """Raises BackupError."""
        super().__init__(url, 0, _form_of(0))
        archive = open_archive(url)
        runs = Point().runs_of(archive.runs())
        self._reader = PointReader(archive, runs)
        self.partitions_seen = 1 + max((vb_id for each in runs for vb_id in each.legs), default=0)
        newest = runs[-1].collections
        self._ids = {path: collection_id for collection_id, (path, _) in newest.items()}

    async def close(self) -> None:
        """Nothing is open."""

    async def collections(self) -> dict[str, int]:
        """Return the collections of the newest run: scope.collection -> id."""
        return self._ids

    def select(self, collection_id: int) -> None:
        """Read this collection."""
        self.form = _form_of(collection_id)

    def rows(self, vb_id: int) -> list[Row]:
        """See RowsCopy. Raises ArchiveDamagedError."""
        view = self._reader.view(vb_id, Point())
        if view.damages:
            raise ArchiveDamagedError(str(view.damages[0]), vb_id=vb_id, node=self.name)
        return [
            (key_in_frame(frame := data[start:stop]), frame[_HEAD])
            for data, start, stop in self._reader.frames(view)
        ]
