"""The files of a data folder beside log and store: each is read by the code that the server reads
it with, or is listed as not read. Changes nothing.

Called by `dcp.server.check.verify`, which holds the folder's lock.

    users.json, cluster.json, map.json, seen.json, backups.json, scrub.json,
    closed.json                                as at a start
    discarded/*.cut, *-election.receipt.json  as for `dcpctl cluster receipts`, to the last byte
    others                                     listed, with the reason why nothing is read
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from dcp.server.access.users import USERS_FILE
from dcp.server.access.users_file import (
    UsersFileError,
    check_newest,
    parse_file,
)
from dcp.server.cluster.cluster_file import ClusterRefusedError, read_cluster_file
from dcp.server.cluster.meta_access import STORE_FOLDER, check_access
from dcp.server.cluster.node_map import MAP_FILE, read_sent_map
from dcp.server.cluster.receipt_files import (
    DISCARD_FOLDER,
    ELECTION_SUFFIX,
    FORMER_DISCARD_FOLDER,
    read_election,
)
from dcp.server.cluster.seen_file import SEEN_FILE, check_seen
from dcp.server.files import TWIN_SUFFIX
from dcp.server.files.kept_twice import (
    NEW_SUFFIX,
    NEWEST_SUFFIX,
    read_kept,
    wrong_copies,
)
from dcp.server.operate.backup_reports import BACKUPS_FILE, read_backups
from dcp.server.storage.closed_times import CLOSED_FILE, read_closed
from dcp.server.storage.folder import (
    CLUSTER_FILE,
    LOCK_NAME,
    MARKER_NAME,
    FolderError,
    log_path,
    store_path,
)
from dcp.server.storage.process.scrubbing import SCRUB_FILE, read_scrub
from vbucket.check.finding import Finding, Kind
from vbucket.log.segment_files import MARK_NAME, SEGMENT_NAME
from vbucket.model.receipt import DiscardDamagedError
from vbucket.store.lmdb.lmdb_file import DATA_FILE_NAME
from vbucket.store.lmdb.page_sums import SUMS_FILE_NAME
from vbucket.store.lmdb.rows_copy import ROWS_FILE_NAME

_DAMAGE: Final = (
    ClusterRefusedError,
    FolderError,
    UsersFileError,
    DiscardDamagedError,
    msgspec.MsgspecError,
    OSError,
)


class NotRead(NamedTuple):
    """A file, or a folder of files, that the check does not read."""

    file: str
    """Relative to the data folder; a folder ends with a slash."""
    why: str


_LMDB_LOCK: Final = "lock.mdb"
"""LMDB makes it anew."""
_READ_ELSEWHERE: Final = frozenset(
    {MARKER_NAME, LOCK_NAME, USERS_FILE + NEWEST_SUFFIX, CLUSTER_FILE + NEWEST_SUFFIX}
)
"""Read when the folder was locked, or with the file that they are about."""
_NOT_READ: Final = (
    (re.compile(r"audit\.log(\.\d+)?"), "the server only writes it"),
    (re.compile(r"lost-log-\d+/"), "copies of a log that was given up: nothing reads them"),
    (re.compile(re.escape(STORE_FOLDER) + "/"), "the metadata store's own data: etcd checks it"),
    (re.compile(rf".*({re.escape(NEW_SUFFIX)}|\.tmp)"), "it was being written when a server ended"),
)
"""Files and folders that dcpd knows and the check does not read, and why."""
_UNKNOWN: Final = "dcpd does not know it; files that settings name are read when it starts"


def check_files(data_path: Path) -> Iterator[Finding | NotRead]:
    """Yield what is wrong with the files, and which are not read."""
    for path in _paths_in(data_path):
        yield from _check(data_path, path)


def _paths_in(folder: Path) -> list[Path]:
    """Return what is in a folder. A twin counts as the file that it is of."""
    return sorted(
        {path.with_name(path.name.removesuffix(TWIN_SUFFIX)) for path in folder.iterdir()}
    )


def _check(data_path: Path, path: Path) -> Iterator[Finding | NotRead]:
    name = path.name + "/" * path.is_dir()
    if name in _READ_ELSEWHERE:
        return
    try:
        if (read := _READERS.get(name)) is not None:
            yield from _read(name, partial(read, data_path))
            yield from _wrong(path, name)
        elif path in {log_path(data_path), store_path(data_path)}:
            yield from _strays(path, name)
        elif name in {f"{DISCARD_FOLDER}/", f"{FORMER_DISCARD_FOLDER}/"}:
            yield from _discarded(path, name)
        else:
            yield _not_read(name)
    except OSError as error:
        yield Finding(Kind.FILE, name, f"the folder cannot be read: {error.strerror}")


def _read(name: str, read: Callable[[], object]) -> Iterator[Finding]:
    try:
        read()
    except _DAMAGE as error:
        yield Finding(Kind.FILE, name, str(error))


def _wrong(path: Path, name: str) -> Iterator[Finding]:
    """Yield a wrong copy of a file whose other one is right."""
    for file, why in wrong_copies(path):
        what = f"{why}. Its other copy is right: a start, or the scrubber, writes this one as that"
        yield Finding(Kind.FILE, str(Path(name).with_name(file)), what)


def _read_users(data_path: Path) -> None:
    path = data_path / USERS_FILE
    text, is_sealed = read_kept(path)
    parse_file(path, text)
    if not is_sealed:
        check_newest(path, text)


def _read_cluster(data_path: Path) -> None:
    member = read_cluster_file(data_path)
    if member is not None:
        check_access(member)


def _read_map(data_path: Path) -> None:
    told = read_sent_map(data_path)
    try:
        member = read_cluster_file(data_path)
    except FolderError:
        return  # a finding of its own
    if member is not None and told is not None and told.cluster != member.cluster:
        raise FolderError(
            f"it is of the cluster {told.cluster}, and {CLUSTER_FILE} of {member.cluster}: the "
            "server takes it for none"
        )


def _read_seen(data_path: Path) -> None:
    try:
        member = read_cluster_file(data_path)
    except FolderError:
        return  # a finding of its own
    try:
        check_seen(data_path / SEEN_FILE, None if member is None else member.cluster)
    except ValueError as error:
        raise FolderError(f"{error}: this node notices no older metadata store by it") from None


_READERS: Final[dict[str, Callable[[Path], object]]] = {
    USERS_FILE: _read_users,
    CLUSTER_FILE: _read_cluster,
    MAP_FILE: _read_map,
    SEEN_FILE: _read_seen,
    BACKUPS_FILE: read_backups,
    SCRUB_FILE: read_scrub,
    CLOSED_FILE: read_closed,
}


def _discarded(folder: Path, prefix: str) -> Iterator[Finding | NotRead]:
    for path in _paths_in(folder):
        name = f"{prefix}{path.name}"
        if path.suffix == ".cut":
            yield from _read(name, partial(read_kept, path))
            yield from _wrong(path, name)
        elif path.name.endswith(ELECTION_SUFFIX):
            yield from _read(name, partial(read_election, path))
            yield from _wrong(path, name)
        else:
            yield _not_read(name)


def _strays(folder: Path, prefix: str) -> Iterator[NotRead]:
    """Yield the files of log and store that are none of theirs; the rest is checked."""
    known = {MARK_NAME, DATA_FILE_NAME, SUMS_FILE_NAME, ROWS_FILE_NAME, _LMDB_LOCK}
    for path in sorted(folder.iterdir()):
        if path.name not in known and not SEGMENT_NAME.match(path.name):
            yield _not_read(f"{prefix}{path.name}")


def _not_read(name: str) -> NotRead:
    return NotRead(name, next((why for kind, why in _NOT_READ if kind.fullmatch(name)), _UNKNOWN))
