"""Inner loops in C: of changes, GETs, replicas, starts, merges, compaction, backlogs, and clients
of streams. They are optional, and equal to their twins in Python.

Most take bytes and return bytes: entries of the log become records and blocks, stored frames become
what a client gets, received frames become runs of changes and their columns. They read and write no
database, and have no effect but their result. Four work on partitions: changes do what
`Engine.store` does and look up keys in LMDB's pages, GETs are answered from memory or from these
pages, a replica applies the commit groups of its master, and a start applies entries of the log as
`Replay` does. Whatever the loops do not know, or find damaged, they leave to Python, which does it,
or says what is wrong. So both forms give the same results, byte by byte, and only Python has error
texts. `LogThread` is no loop: it makes two system calls for the committer, on a thread of its own.

Who calls it: `vbucket.upkeep`, `vbucket.engine`, `vbucket.store`, `dcp.server.storage.log_thread`,
`clients.backup.strip`, `clients.streaming.change_runs`. `loops` is built by hatch_build.py from the
C sources here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c

if TYPE_CHECKING:
    from array import array

    from vbucket.native.loops import (
        GetRun,
        GroupRun,
        JsonScan,
        KeyTree,
        LiveRun,
        LogThread,
        ReplayRun,
        SetRun,
        Staged,
        Superseded,
    )

    Partitions = list[Any]
    MetaBelow = Callable[[Any, bytes, bytes | None], tuple[int, int, int, int, int, int, int]]
    TreeOf = Callable[[], KeyTree | None]
    TreesOf = Callable[[], tuple[KeyTree, KeyTree] | None]
    Keep = Callable[[Any, bytes, bytes], None]
    CutFrames = Callable[[bytes, array[int], int, int, int, bool, bool], bytearray | None]
    JoinFrames = Callable[[bytes | memoryview, int, array[int], int, int, int], bytes | None]
    Repack = Callable[
        [int, list[tuple[bytes, bytes, bytes | None]], int, int],
        list[tuple[bytes, bytes]] | None,
    ]
    SectionColumns = tuple[list[int], list[int], list[int], bytes, bytes, bytes, bytes]
    SplitFrames = Callable[[bytes, int, int], SectionColumns | None]
    FrameKeys = Callable[[bytes, int, int], list[bytes] | None]
    Link = Callable[[Any, bytes], bytes]
    ApplyOther = Callable[[tuple[int, bytes, bytes, int, int, int, bool]], None]
    EntriesOf = Callable[[bytes, int, int, int, int, int], bytes | None]


Row = tuple[int, bytes, bytes, int, int, int, int, int, int]
"""Partition, key, value, seqno, rev_seqno, CAS, flags, expiry and datatype of a mutation."""


class ChangeLoops(NamedTuple):
    """What clients of streams take from the loops; `clients.streaming.change_runs` explains it."""

    mutations_run: Callable[[bytes, int, int, int, int], tuple[int, int, int]]
    stored_run: Callable[[bytes, int, int, int, int], tuple[int, int, int]]
    change_places: Callable[[bytes, int, int], tuple[bytes, int]]
    mutation_rows: Callable[[bytes, int, int, int], list[Row]]
    mutation_keys: Callable[[bytes, int, int, int], list[bytes]]
    mutation_values: Callable[[bytes, int, int], list[bytes]]
    mutation_numbers: Callable[[bytes, int, int, int, int], list[int]]


def change_loops() -> ChangeLoops | None:
    """Return the loops of clients, None if they are not built."""
    try:
        from vbucket.native.loops import (
            change_places,
            mutation_keys,
            mutation_numbers,
            mutation_rows,
            mutation_values,
            mutations_run,
            stored_run,
        )
    except ModuleNotFoundError:
        return None
    return ChangeLoops(
        mutations_run,
        stored_run,
        change_places,
        mutation_rows,
        mutation_keys,
        mutation_values,
        mutation_numbers,
    )


class JsonLoops(NamedTuple):
    """What looks at values for JSON; `vbucket.engine.documents.json_value` explains it."""

    is_json: Callable[[bytes | memoryview], bool]
    mark_json: Callable[[bytes, int], bytes]


def json_loops() -> JsonLoops | None:
    """Return what looks for JSON, None if the loops are not built."""
    try:
        from vbucket.native.loops import is_json, mark_json
    except ModuleNotFoundError:
        return None
    return JsonLoops(is_json, mark_json)


class FrameLoops(NamedTuple):
    """What backlogs take from the loops; `vbucket.store.runs` explains it."""

    cut: CutFrames
    join: JoinFrames


def frame_loops() -> FrameLoops | None:
    """Return the loops of backlogs, None if the loops are not built."""
    try:
        from vbucket.native.loops import cut_frames, join_frames
    except ModuleNotFoundError:
        return None
    return FrameLoops(cut_frames, join_frames)


class TextLoops(NamedTuple):
    """What sessions of memcached's text protocol take from the loops."""

    changes: Callable[[bytes | bytearray, int, int, int], tuple[bytes, list[int], list[int]]]
    gets: Callable[[bytes | bytearray, int, int], tuple[bytes, list[int], list[int]]]
    values: Callable[[bytes, bool, bool], bytes]
    outcomes: Callable[[list[bytes]], bytes]


def text_loops() -> TextLoops | None:
    """Return the loops of the text protocol, None if they are not built."""
    try:
        from vbucket.native.loops import text_changes, text_gets, text_outcomes, text_values
    except ModuleNotFoundError:
        return None
    return TextLoops(text_changes, text_gets, text_values, text_outcomes)


def new_staged() -> Staged | None:
    """Return a place for the entries of a merge, None if the loops are not built."""
    try:
        from vbucket.native.loops import Staged
    except ModuleNotFoundError:
        return None
    return Staged()


def entries_loop() -> EntriesOf | None:
    """Return the loop that makes entries of a packet of frames, None if the loops are not built."""
    try:
        from vbucket.native.loops import entries_of
    except ModuleNotFoundError:
        return None
    return entries_of


class ArchiveLoops(NamedTuple):
    """What readers of archives take from the loops."""

    split: SplitFrames
    keys: FrameKeys


def archive_loops() -> ArchiveLoops | None:
    """Return the loops over sections of archives, None if they are not built."""
    try:
        from vbucket.native.loops import frame_keys, split_frames
    except ModuleNotFoundError:
        return None
    return ArchiveLoops(split_frames, frame_keys)


class _RunLoops(NamedTuple):
    """The loops that work on partitions."""

    set_run: type[SetRun]
    replay_run: type[ReplayRun]
    group_run: type[GroupRun]
    get_run: type[GetRun]


def _run_loops() -> _RunLoops | None:
    """Return these loops, None if they are not built."""
    try:
        from vbucket.native.loops import GetRun, GroupRun, ReplayRun, SetRun
    except ModuleNotFoundError:
        return None
    return _RunLoops(SetRun, ReplayRun, GroupRun, GetRun)


def set_run(
    partitions: Partitions,
    meta_below: MetaBelow,
    tree: TreeOf,
    item_cache: object,
    damaged: type[Exception],
) -> SetRun | None:
    """Return what applies plain changes to these partitions, None if the loops are not built.

    `meta_below` is that of `Versions`. `tree` returns the tree of `by_key`, or None, and then
    `meta_below` looks up every key. If one of them raises `damaged`, Python handles the request.
    """
    loops = _run_loops()
    return (
        None if loops is None else loops.set_run(partitions, meta_below, tree, item_cache, damaged)
    )


def replay_run(partitions: Partitions) -> ReplayRun | None:
    """Return what applies plain changes of the log at a start, None if the loops are not built."""
    loops = _run_loops()
    return None if loops is None else loops.replay_run(partitions)


def group_run(
    partitions: Partitions, presumed: dict[int, list[bytes]], link: Link, apply_other: ApplyOther
) -> GroupRun | None:
    """Return what applies commit groups of a master to these partitions, None if the loops are not
    built.

    `presumed` is what `DeferredLookups` has to look up. `link` returns an entry with the previous
    version of its key that is here. `apply_other` applies a change that the loop does not know.
    """
    loops = _run_loops()
    return None if loops is None else loops.group_run(partitions, presumed, link, apply_other)


def get_run(
    partitions: Partitions, trees: TreesOf, keep: Keep, damaged: type[Exception]
) -> GetRun | None:
    """Return what answers plain GETs of these partitions, None if the loops are not built.

    `trees` returns those of `by_key` and `by_seqno`, or None, and then documents that are only in
    the store are left to Python; so they are if it raises `damaged`. `keep` is that of the item
    cache.
    """
    loops = _run_loops()
    return None if loops is None else loops.get_run(partitions, trees, keep, damaged)


def live_run(
    stream: type, part: type, layer: type, tally: type, caught_up: object, waits_for_cut: object,
    replica: object,
) -> LiveRun | None:  # fmt: skip
    """Return what cuts snapshots of live streams, None if the loops are not built."""
    try:
        from vbucket.native.loops import LiveRun
    except ModuleNotFoundError:
        return None
    return LiveRun(stream, part, layer, tally, caught_up, waits_for_cut, replica)


def key_tree(
    file: memoryview,
    page_bytes: int,
    last_page: int,
    depth: int,
    root: int,
    sums: memoryview | None = None,
    transaction: int = 0,
) -> KeyTree | None:
    """Return what looks up keys in a tree of LMDB's pages; with `sums`, the checksums of this
    transaction's state, it compares each page. None: the loops are not built, or this
    is no tree.
    """
    try:
        from vbucket.native.loops import KeyTree
    except ModuleNotFoundError:
        return None
    try:
        return KeyTree(file, page_bytes, last_page, depth, root, sums, transaction)
    except ValueError:
        return None


def page_crcs(
    file: memoryview, page_bytes: int, summed_bytes: int, numbers: list[int]
) -> list[int]:
    """Return the CRC-32C of the first bytes of some pages, as far as they are in the file."""
    try:
        from vbucket.native.loops import page_crcs as crcs_in_c
    except ModuleNotFoundError:
        starts = [number * page_bytes for number in numbers]
        return [google_crc32c.value(bytes(file[at : at + summed_bytes])) for at in starts]
    return crcs_in_c(file, page_bytes, summed_bytes, numbers)


def log_thread(done_fd: int) -> LogThread | None:
    """Return a thread that writes the log without the interpreter lock. None: the loops are not
    built, this is not Linux, or there is no room for a thread.
    """
    try:
        from vbucket.native.loops import LogThread
    except ImportError:
        return None
    try:
        return LogThread(done_fd)
    except OSError:
        return None


def json_scan_loop() -> type[JsonScan] | None:
    """Return what finds values in a JSON document, None if the loops are not built."""
    try:
        from vbucket.native.loops import JsonScan
    except ModuleNotFoundError:
        return None
    return JsonScan


class CompactionLoops(NamedTuple):
    """What compaction takes from the loops."""

    repack: Repack
    superseded: type[Superseded]


def compaction_loops() -> CompactionLoops | None:
    """Return the loops of compaction, None if they are not built."""
    try:
        from vbucket.native.loops import Superseded, repack
    except ModuleNotFoundError:
        return None
    return CompactionLoops(repack, Superseded)


class HashLoops(NamedTuple):
    """What tables of hashes take from the loops; `vbucket.native.key_hashes` explains it."""

    add: Callable[[bytearray, int, list[tuple[bytes, bytes]], int, int, bytes, int, int, int], int]
    within: Callable[
        [bytes, int, list[tuple[bytes, bytes]], int, bytes, int, int, int],
        list[tuple[bytes, bytes]],
    ]


def hash_loops() -> HashLoops | None:
    """Return the loops over rows of documents, None if the loops are not built."""
    try:
        from vbucket.native.loops import add_hashes, rows_within
    except ModuleNotFoundError:
        return None
    return HashLoops(add_hashes, rows_within)
