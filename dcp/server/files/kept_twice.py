"""Small files of a data folder: each has a checksum and a twin, so one wrong copy is put right.

    cluster.json         {"seal":"<sequence>-<CRC-32C>", ...}    both in hex; the rest is content
    cluster.json.twin    the same bytes

Who calls it: the owners of these files read and write; a start and the scrubber compare
(`mend_folder`). The functions that take a `FolderDisk` are what they do, without locks.

The rule (`choose`): a copy whose checksum is right can be in force. Of two, the one with the higher
sequence is. A wrong copy is written anew from the one in force; if none is right, that is named.

Invariants
- an older copy never stands beside a newer one: before a file gets its new content, the twin of
  the old one is gone from the disk. So what is put in the place of a wrong copy is what was in
  force, and a power cut at any point leaves the old content or the new one;
- a file without a seal was written by an earlier version of dcpd, and is taken as it is. For
  cluster.json and users.json that version must have left its `.newest` beside it. Else a sealed
  twin goes first: somebody has put an old copy there;
- the only right copy of a file is never removed: a wrong one is put right before a write;
- a write that fails before the file has its new name changes nothing; after that it counts as done;
- one write or comparison in a folder at a time (`_turn_of`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import google_crc32c

from dcp.server.files import TWIN_SUFFIX
from vbucket.check.finding import Kind
from vbucket.check.scrub import Damage
from vbucket.log.device_files import FolderDisk
from vbucket.model.receipt import DiscardDamagedError, unpack_cut_off

NEW_SUFFIX: Final = ".new"
"""Of a file that is being written: a crash may leave it."""
NEWEST_SUFFIX: Final = ".newest"
"""Of the file with which earlier versions say which content of another file is the newest."""
KEPT_NAMES: Final = (
    "backups.json", "closed.json", "cluster.json", "founding", "map.json", "scrub.json",
    "seen.json", "users.json",
)  # fmt: skip
KEPT_FOLDERS: Final = ("discarded", "quarantine")
"""Every file in these is kept twice."""
MENDED: Final = "it was written as its twin is, whose checksum is right"
_MISSING: Final = "it is missing"
_UNSEALED: Final = "it has no checksum"
_CUT_SUFFIX: Final = ".cut"
"""Discard files have a checksum of their own, and are written once."""
_NAMED_NEWEST: Final = frozenset({"cluster.json", "users.json"})
_SEAL: Final = re.compile(rb'\{"seal":"([0-9a-f]{16})-([0-9a-f]{8})"(,?)')
_SEAL_FORM: Final = b'{"seal":"0000000000000000-00000000"'
_FIXED_AT: Final = (*range(9), 25, 34)
_LIKE_A_SEAL: Final = 8
"""Of these bytes so many are there: then it is a seal that is damaged."""
_turns: Final[dict[Path, threading.Lock]] = {}


class FileDamagedError(OSError):
    """No copy of a file is what was written. `strerror` says why."""

    def __init__(self, why: str) -> None:
        super().__init__(errno.EBADMSG, why)

    def __str__(self) -> str:
        """Return the reason without a number."""
        return str(self.strerror)


class Copy(NamedTuple):
    """One of two copies, as it was read."""

    sequence: int
    """0: it has no seal."""
    content: bytes
    """Without its seal."""
    why: str = ""
    """Why it cannot be in force; "": it can."""


class Chosen(NamedTuple):
    """What is in force, and what is wrong with each copy; "": nothing."""

    copy: Copy
    main_why: str
    twin_why: str


class KeptContent(NamedTuple):
    """What a file holds."""

    content: bytes
    is_sealed: bool
    """Not so: an earlier version of dcpd has written it."""


# -- the rule, pure --------------------------------------------------------------------------------


def read_copy(name: str, data: bytes | None) -> Copy:
    """Read a copy of the file `name`; `data` is None if it is missing."""
    if data is None:
        return Copy(0, b"", _MISSING)
    if name.endswith(_CUT_SUFFIX):
        return Copy(1, data, _why_not_whole(name, data))
    found = _SEAL.match(data)
    if found is None:
        is_like_one = sum(data[at : at + 1] == _SEAL_FORM[at : at + 1] for at in _FIXED_AT)
        return Copy(0, data, "its seal is damaged" if is_like_one >= _LIKE_A_SEAL else "")
    stamp, crc, _ = found.groups()
    content = b"{" + data[found.end() :]
    if google_crc32c.value(stamp + content) != int(crc, 16):
        return Copy(0, b"", "its checksum is wrong")
    return Copy(int(stamp, 16), content)


def _why_not_whole(name: str, data: bytes) -> str:
    try:
        named = unpack_cut_off(data).file_name
    except DiscardDamagedError as error:
        return str(error)
    return "" if named == name else f"it is a copy of {named}"


def sealed(name: str, sequence: int, content: bytes) -> bytes:
    """Return the bytes of a copy. `content` is a JSON object, but for discard files."""
    if name.endswith(_CUT_SUFFIX):
        return content
    assert content.startswith(b"{"), f"{name} is no JSON object"
    stamp = b"%016x" % sequence
    crc = google_crc32c.value(stamp + content)
    comma = b"" if content[1:].lstrip().startswith(b"}") else b","
    return b'{"seal":"%s-%08x"%s%s' % (stamp, crc, comma, content[1:])


def choose(main: Copy, twin: Copy, *, is_plain_older: bool = False) -> Chosen | None:
    """Return which copy is in force; None: none is right. `is_plain_older`: one without a seal is
    older than a sealed twin.
    """
    right = [copy for copy in (main, twin) if not copy.why and copy.sequence]
    if not main.why and not main.sequence:
        is_of_before = _is_object(main.content) and not (right and is_plain_older)
        if is_of_before or twin.why == _MISSING:
            return Chosen(main, _UNSEALED, _UNSEALED)
    if not right:
        return None
    newest = max(right, key=lambda copy: copy.sequence)
    return Chosen(newest, _why_other(main, newest), _why_other(twin, newest))


def _why_other(copy: Copy, newest: Copy) -> str:
    if copy.why or copy == newest:
        return copy.why
    return "it is older than its other copy" if copy.sequence else _UNSEALED


def _is_object(data: bytes) -> bool:
    try:
        return isinstance(json.loads(data), dict)
    except ValueError:
        return False


# -- on a disk -------------------------------------------------------------------------------------


def put_kept(disk: FolderDisk, name: str, content: bytes) -> None:
    """Write both copies. Durable on return. Raises OSError: nothing has changed."""
    twin = name + TWIN_SUFFIX
    copies = [_copy_in(disk, name, each) for each in (name, twin)]
    newest = max(0 if copy.why else copy.sequence for copy in copies)
    data = sealed(name, newest + 1, content)
    if copies[1].sequence == newest and not copies[1].why and copies[0] != copies[1]:
        _put(disk, name, sealed(name, newest, copies[1].content))  # before its twin goes
    try:
        for each in (name, twin):
            _write(disk, each + NEW_SUFFIX, data)
        if copies[1].why != _MISSING:
            disk.remove(twin)
            disk.sync_folder()
        disk.rename(name + NEW_SUFFIX, name)
    except OSError:
        for each in (name, twin):
            with contextlib.suppress(OSError):
                disk.remove(each + NEW_SUFFIX)
        raise
    disk.sync_folder()
    with contextlib.suppress(OSError):  # the scrubber writes it
        disk.rename(twin + NEW_SUFFIX, twin)
        disk.sync_folder()


def mend_kept(
    disk: FolderDisk, name: str, *, is_plain_older: bool = False, may_adopt: bool = True
) -> list[tuple[str, str, bool]]:
    """Put a wrong copy right. Return which were wrong: its name, why, and whether it was mended. A
    file without a seal gets one, and a twin, if that may be. Raises OSError.
    """
    twin = name + TWIN_SUFFIX
    copies = _copy_in(disk, name, name), _copy_in(disk, name, twin)
    if all(copy.why == _MISSING for copy in copies):
        return []
    chosen = choose(*copies, is_plain_older=is_plain_older)
    if chosen is None:
        return [(name, _why_none(*copies), False)]
    copy = chosen.copy
    if not copy.sequence:
        if not _is_object(copy.content):
            return [(name, "it is damaged, and has no twin", False)] if copy.content else []
        if may_adopt:
            put_kept(disk, name, copy.content)
        return []
    wrong = []
    for each, why in ((name, chosen.main_why), (twin, chosen.twin_why)):
        if why:
            _put(disk, each, sealed(name, copy.sequence, copy.content))
            wrong.append((each, why, True))
    return wrong


def _put(disk: FolderDisk, name: str, data: bytes) -> None:
    """Replace one copy durably."""
    _write(disk, name + NEW_SUFFIX, data)
    disk.rename(name + NEW_SUFFIX, name)
    disk.sync_folder()


def _write(disk: FolderDisk, name: str, data: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        disk.remove(name)  # whoever made it might read the new one
    fd = disk.create(name)
    try:
        at = 0
        while at < len(data):
            at += disk.write(fd, memoryview(data)[at:], at)
        disk.sync(fd)
    finally:
        disk.close(fd)


def _copy_in(disk: FolderDisk, name: str, file: str) -> Copy:
    return _copy_of(name, partial(disk.read, file))


def _copy_of(name: str, read: Callable[[], bytes]) -> Copy:
    """Read a copy of the file `name`. A bad sector is damage like any other."""
    try:
        return read_copy(name, read())
    except FileNotFoundError:
        return read_copy(name, None)
    except OSError as error:
        return Copy(0, b"", f"it cannot be read: {error.strerror}")


def _why_none(main: Copy, twin: Copy) -> str:
    return f"{main.why or 'it is damaged'}, and its twin does not help: {twin.why or _UNSEALED}"


# -- in a data folder ------------------------------------------------------------------------------


def twin_of(path: Path) -> Path:
    """Return where the twin of a file is."""
    return path.with_name(path.name + TWIN_SUFFIX)


def is_kept(path: Path) -> bool:
    """Whether a file is there, or its twin."""
    return path.exists() or twin_of(path).exists()


def read_kept(path: Path) -> KeptContent:
    """Return what is in force. Raises FileNotFoundError if there is no copy, else OSError."""
    main, twin = (_copy_of(path.name, each.read_bytes) for each in (path, twin_of(path)))
    if main.why == twin.why == _MISSING:
        raise FileNotFoundError(errno.ENOENT, "no such file", str(path))
    chosen = choose(main, twin, is_plain_older=_is_plain_older(path))
    if chosen is None:
        raise FileDamagedError(_why_none(main, twin))
    return KeptContent(chosen.copy.content, bool(chosen.copy.sequence))


def wrong_copies(path: Path) -> list[tuple[str, str]]:
    """Return the names of wrong copies whose other one is right, and why. A missing twin is none: a
    crash may leave that. Changes nothing.
    """
    copies = [_copy_of(path.name, each.read_bytes) for each in (path, twin_of(path))]
    chosen = choose(*copies, is_plain_older=_is_plain_older(path))
    if chosen is None or not chosen.copy.sequence:
        return []
    twin_why = "" if chosen.twin_why == _MISSING else chosen.twin_why
    found = ((path.name, chosen.main_why), (twin_of(path).name, twin_why))
    return [(file, why) for file, why in found if why]


def write_kept(path: Path, content: bytes) -> None:
    """Replace a file and its twin durably. A crash leaves the old content or the new one. Raises
    OSError: nothing has changed.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _turn_of(path.parent), _disk(path.parent) as disk:
        put_kept(disk, path.name, content)


def remove_kept(path: Path) -> None:
    """Remove a file and its twin. Raises OSError."""
    with _turn_of(path.parent):
        for each in (twin_of(path), path):
            each.unlink(missing_ok=True)


def mend_folder(data_path: Path, *, is_start: bool = False) -> list[Damage]:
    """Compare all files that are kept twice, and put wrong copies right; return what was wrong.

    At a start a missing twin is no damage: a crash may leave that; and only the files that a start
    reads are looked at.
    """
    found = []
    for folder, name in _kept_in(data_path, is_start=is_start):
        path = folder / name
        place = str(path.relative_to(data_path))
        try:
            with _turn_of(folder), _disk(folder) as disk:
                wrong = mend_kept(
                    disk, name, is_plain_older=_is_plain_older(path),
                    may_adopt=name not in _NAMED_NEWEST,
                )  # fmt: skip
        except OSError as error:
            wrong = [(name, f"its copies cannot be compared: {error.strerror}", False)]
        for each, why, is_mended in wrong:
            if why == _MISSING and (is_start or name.endswith(_CUT_SUFFIX)) and each != name:
                continue
            found.append(
                Damage(
                    str(Kind.FILE), str(Path(place).with_name(each)), f"file {each}", why,
                    mended=MENDED if is_mended else "",
                )
            )  # fmt: skip
    return found


def _kept_in(data_path: Path, *, is_start: bool) -> Iterator[tuple[Path, str]]:
    for name in KEPT_NAMES:
        if is_kept(data_path / name):
            yield data_path, name
    for folder in () if is_start else KEPT_FOLDERS:
        path = data_path / folder
        names = {each.name.removesuffix(TWIN_SUFFIX) for each in path.iterdir()} if (
            path.is_dir()
        ) else set()  # fmt: skip
        for name in sorted(names):
            if name.endswith((_CUT_SUFFIX, ".receipt.json")):
                yield path, name


def _is_plain_older(path: Path) -> bool:
    """Whether a copy without a seal is older than a sealed twin of it."""
    newest = path.with_name(path.name + NEWEST_SUFFIX)
    return path.name in _NAMED_NEWEST and not newest.exists()


@contextlib.contextmanager
def _disk(folder: Path) -> Iterator[FolderDisk]:
    disk = FolderDisk(folder)
    try:
        yield disk
    finally:
        disk.release()


def _turn_of(folder: Path) -> threading.Lock:
    return _turns.setdefault(folder.absolute(), threading.Lock())
