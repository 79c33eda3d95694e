"""The folder of an archive: files at a path or fsspec URL, each written as a whole.

Called by `clients.backup.archives.archive`, its lock, and exports. Only this module uses fsspec,
and only for URLs: `LocalFiles` has what it uses of a file system for paths.

Invariants
- local files are synced, then renamed. Object stores show a file only when it is complete. Other
  file systems may show half-written files; these have no valid trailer or checksum;
- a failed write leaves no file behind.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final

from clients.backup.archives.archive_errors import (
    EXTRA_HINT,
    ArchiveError,
    BackupError,
    MissingExtraError,
)

PARTIAL: Final = ".part"
"""Suffix of files that are being written."""

_HINTS: Final = {
    errno.ENOSPC: "Free some space and run it again. Everything written so far is kept.",
    errno.EDQUOT: "Free some quota and run it again. Everything written so far is kept.",
    errno.EACCES: "Run it as the user that owns the archive's files.",
    errno.EPERM: "Run it as the user that owns the archive's files.",
    errno.EROFS: "The file system is mounted read-only. Remount it for writing.",
}
"""Hints by errno."""


class Place:
    """The folder of one archive."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self.url = url
        self._fs = fs
        self._root = root.rstrip("/")
        self.is_local = isinstance(fs, LocalFiles)

    @classmethod
    def of(cls, url: str) -> Place:
        """Return the place of a path or fsspec URL. Raises BackupErrors."""
        if not url:
            raise ArchiveError("no archive is named", hint="Set --archive to a path or URL.")
        fs, root = filesystem_of(url)
        return cls(fs, root, url)

    def local_path(self, path: str) -> Path:
        """Return the path of a file in a local archive."""
        assert self.is_local
        return Path(self._root, path)

    def read(self, path: str, start: int | None = None, end: int | None = None) -> bytes:
        """Return a file's bytes, or a range of them (a negative `start` counts from the end).

        Raises FileNotFoundError, ArchiveError.
        """
        try:
            data: bytes = self._fs.cat_file(f"{self._root}/{path}", start=start, end=end)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise io_error(self.url, f"{path} cannot be read", error) from error
        return data

    def write(self, path: str, data: bytes) -> None:
        """Write a file as a whole, and durably if it is local. Raises ArchiveError."""
        try:
            if self.is_local:
                _write_local(Path(self._root, path), data)
            else:
                self._fs.pipe_file(f"{self._root}/{path}", data)
        except OSError as error:
            raise io_error(self.url, f"{path} cannot be written", error) from error

    def delete(self, path: str) -> None:
        """Delete a file if it exists. Raises ArchiveError."""
        try:
            self._fs.rm_file(f"{self._root}/{path}")
        except FileNotFoundError:
            pass
        except OSError as error:
            raise io_error(self.url, f"{path} cannot be deleted", error) from error

    def files(self, folder: str) -> dict[str, int]:
        """Return the files below a folder and their sizes. Raises ArchiveError."""
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise io_error(self.url, "it cannot be listed", error) from error
        return {
            name[name.rindex(f"/{folder}/") + 1 :]: int(info["size"] or 0)
            for name, info in found.items()
        }

    @contextmanager
    def open_whole(self) -> Iterator[IO[bytes]]:
        """Open the place itself as a file for writing. If writing fails, no partial file remains.

        Raises OSErrors.
        """
        path = Path(self._root)
        if not self.is_local:
            file = self._fs.open(self._root, "wb", autocommit=False)
            try:
                with file:
                    yield file
            except BaseException:
                file.discard()
                raise
            file.commit()
        elif path.exists() and not path.is_file():  # a pipe or a device
            with path.open("wb") as file:
                yield file
        else:
            partial = path.with_name(path.name + PARTIAL)
            try:
                with partial.open("wb") as file:
                    yield file
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise

    @property
    def is_taken(self) -> bool:
        """Whether a local place exists and is not empty. Partial files of killed writers are
        ignored. Always False for remote places.
        """
        if not self.is_local:
            return False
        folder = Path(self._root)
        if folder.is_dir():
            return any(not path.name.endswith(PARTIAL) for path in folder.iterdir())
        return folder.exists()


class LocalFiles:
    """The files of this machine, with the methods of fsspec that `Place` uses."""

    def invalidate_cache(self) -> None:
        """Do nothing: nothing is cached."""

    def cat_file(self, path: str, start: int | None, end: int | None) -> bytes:
        """Return a slice of a file's bytes. Raises OSErrors."""
        with Path(path).open("rb") as file:
            first, after, _ = slice(start, end).indices(os.fstat(file.fileno()).st_size)
            file.seek(first)
            return file.read(max(after - first, 0))

    def rm_file(self, path: str) -> None:
        """Delete a file. Raises OSErrors."""
        Path(path).unlink()

    def find(self, folder: str, *, detail: bool) -> dict[str, dict[str, int]]:
        """Return the paths of all files below a folder, in order, each with its size."""
        assert detail
        found = {}
        for path in sorted(Path(folder).rglob("*")):
            with suppress(FileNotFoundError):  # a partial file that got its name meanwhile
                if path.is_file():
                    found[str(path)] = {"size": path.stat().st_size}
        return found


LOCAL: Final = ("file://", "local://")


def filesystem_of(url: str) -> tuple[Any, str]:
    """Return the files of this machine for a path, or else the fsspec file system of a URL, and the
    path in it. Raises BackupError.
    """
    path = next((url.removeprefix(each) for each in LOCAL if url.startswith(each)), url)
    if "://" not in path:
        return LocalFiles(), str(Path(path).expanduser().absolute())
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingExtraError("fsspec, which opens URLs, is not installed", node=url) from None
    try:
        fs, root = url_to_fs(url)
    except ImportError as error:
        raise MissingExtraError(
            f"no driver for this URL: {error}", node=url,
            hint=f"{EXTRA_HINT} is enough for local files. Others need the package named above.",
        ) from None  # fmt: skip
    except ValueError as error:
        raise ArchiveError(
            f"the URL cannot be used: {error}", node=url,
            hint="Use a path, or a URL that fsspec supports, such as s3://bucket/folder.",
        ) from error  # fmt: skip
    except OSError as error:
        raise io_error(url, "the URL cannot be used", error) from error
    return fs, str(root)


def io_error(url: str, what: str, error: OSError) -> BackupError:
    """Return the error for a failed operation on files."""
    hint = _HINTS.get(error.errno or 0)
    return ArchiveError(f"{what}: {error.strerror or error}", node=url, hint=hint)


def _write_local(path: Path, data: bytes) -> None:
    """Write, sync, rename, sync the folder: after a crash the file is complete or missing."""
    partial = path.with_name(path.name + PARTIAL)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
