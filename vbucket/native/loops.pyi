"""The interface of the C sources here."""

from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

CRC32C_WAY: str
"""How checksums are computed: "sse4.2", "arm" or "tables"."""
LOADS_DICTS_AHEAD: int
"""1: runs load what their look-ups in dictionaries will read. 0: this Python's dictionaries do not
look as expected."""

def crc32c(data: bytes, /) -> int:
    """Return the CRC-32C of bytes."""

def crc32c_by_tables(data: bytes, /) -> int:
    """Return the same, without the processor's instruction."""

def page_crcs(
    file: memoryview, page_bytes: int, summed_bytes: int, numbers: list[int], /
) -> list[int]:
    """Return the CRC-32C of the first bytes of some pages, as far as they are in the file."""

def is_json(text: bytes | memoryview, /) -> bool:
    """Return whether a text is JSON (`vbucket.engine.documents.json_value`)."""

def mark_json(packet: bytes, count: int, /) -> bytes:
    """Return a packet of `count` frames (`vbucket.engine.loading.bulk`) with the JSON bit of each
    mutation set by its value. What is malformed stays as it is.
    """

def entries_of(
    packet: bytes, count: int, vb_id: int, first_seqno: int, epoch: int, cas_max: int, /
) -> bytes | None:
    """Return the frames of a packet (`vbucket.engine.loading.bulk`) as entries of new keys, joined,
    with consecutive seqnos. None: Python should do it, or say what is wrong.
    """

def split_frames(
    data: bytes, start: int, end: int, /
) -> tuple[list[int], list[int], list[int], bytes, bytes, bytes, bytes] | None:
    """Return the columns of the frames in a part of `data`: starts, ends, body lengths; and of
    each a byte: opcode, key length, extras length, first byte of the key (0: it has none). None if
    a frame is not sound, or its key is longer than 255 bytes.
    """

def frame_keys(data: bytes, start: int, end: int, /) -> list[bytes] | None:
    """Return the keys of the same frames; None as above."""

def add_hashes(
    sums: bytearray,
    bits: int,
    rows: list[tuple[bytes, bytes]],
    sign: int,
    prefix_at: int,
    prefix: bytes,
    cas_at: int,
    rev_at: int,
    opcode: int,
    /,
) -> int:
    """Add the hashes of documents to the sums of their buckets, or subtract them (`sign` below 1);
    return how many there are (`vbucket.native.key_hashes`).
    """

def rows_within(
    wanted: bytes,
    bits: int,
    rows: list[tuple[bytes, bytes]],
    prefix_at: int,
    prefix: bytes,
    cas_at: int,
    rev_at: int,
    opcode: int,
    /,
) -> list[tuple[bytes, bytes]]:
    """Return the rows of documents whose bucket is wanted, which is a byte of each."""

def repack(
    vb_id: int,
    parts: list[tuple[bytes, bytes, bytes | None]],
    seqno_before: int,
    body_bytes_target: int,
    /,
) -> list[tuple[bytes, bytes]] | None:
    """Do what `vbucket.store.block.repack_blocks` does; the parts are key and value of a block, and
    what is kept of it. None: Python should do it.
    """

def join_frames(
    body: bytes | memoryview, crc: int, ends: array[int], low: int, high: int, opaque: int, /
) -> bytes | None:
    """Return the frames of a block's body with indexes low to high - 1, joined and with an opaque.
    `ends` are 32-bit numbers. None: the body is not what was written, and Python says so.
    """

def cut_frames(
    frames: bytes,
    ends: array[int],
    low: int,
    high: int,
    opaque: int,
    is_unprefixed: bool,
    is_stripped: bool,
    /,
) -> bytearray | None:
    """Return the frames with indexes low to high - 1 in the form that `vbucket.store.runs` makes:
    with an opaque, without the collection's byte and without XATTRs. `ends` are 32-bit numbers.
    None: a frame is not a sound mutation, and Python should do it.
    """

def mutations_run(
    data: bytes, at: int, end: int, seqno: int, limit: int, /
) -> tuple[int, int, int]:
    """See `clients.streaming.change_runs.mutations_run`, and the same below."""

def stored_run(data: bytes, at: int, end: int, seqno: int, limit: int, /) -> tuple[int, int, int]:
    """See there."""

def change_places(data: bytes, at: int, end: int, /) -> tuple[bytes, int]:
    """See there."""

def mutation_rows(data: bytes, at: int, count: int, skipped: int, /) -> list[Row]:
    """See there."""

def mutation_keys(data: bytes, at: int, count: int, skipped: int, /) -> list[bytes]:
    """See there."""

def mutation_values(data: bytes, at: int, count: int, /) -> list[bytes]:
    """See there."""

def mutation_numbers(data: bytes, at: int, count: int, offset: int, width: int, /) -> list[int]:
    """See there."""

Row = tuple[int, bytes, bytes, int, int, int, int, int, int]
"""Partition, key, value, seqno, rev_seqno, CAS, flags, expiry, datatype."""

def text_changes(
    text: bytes | bytearray, position: int, value_bytes_max: int, count_max: int, /
) -> tuple[bytes, list[int], list[int]]:
    """Return the plain changes of memcached's text protocol that are at a position, `count_max` and
    256 at most, as requests of the binary one, quiet ones for `noreply`; and where each of them
    ends in the text, and in the packet.
    """

def text_gets(
    text: bytes | bytearray, position: int, count_max: int, /
) -> tuple[bytes, list[int], list[int]]:
    """Return the lines of `get` as a GETK for the last key of each, and GETKQs for those before it,
    as `text_changes` does. No line begins behind `count_max` keys, and none is cut.
    """

def text_values(answers: bytes, shows_cas: bool, are_lines: bool, /) -> bytes:
    """Return the answers of GETKs and GETKQs as VALUE lines and blocks, with the CAS for `gets`.
    `are_lines`: that of a GETK ends with END, and may be a miss. Raises ValueError for others.
    """

def text_outcomes(answers: list[bytes], /) -> bytes:
    """Return the answers of changes, of quiet ones nothing. Raises ValueError for others."""

class Superseded:
    """The seqnos of superseded versions that were not met yet."""

    def __init__(self) -> None: ...
    def mark(self, key: bytes, value: bytes, floor: int, /) -> bytes | None:
        """Add what the versions of a block up to the floor supersede. Return a byte for each of its
        versions, 0 if it is superseded itself; None if none is. Raises ValueError if this is not a
        sound block.
        """

class ReplayRun:
    """Applies plain changes of the log at a start."""

    def __init__(self, partitions: list[Any], /) -> None: ...
    def adds_up(self, payload: bytes, /) -> bool:
        """Whether the lengths of a group's entries add up to its own."""

    def apply(self, payload: bytes, at: int, presumed: dict[int, list[bytes]], /) -> int:
        """Apply the entries of a group from position `at` on, and add the keys of which only the
        store knows whether they were documents to `presumed`. Return the position of the first
        entry that is for Python.
        """

class SetRun:
    """Applies plain changes."""

    def __init__(
        self,
        partitions: list[Any],
        meta_below: Callable[..., tuple[int, ...]],
        tree: Callable[[], KeyTree | None],
        item_cache: object,
        damaged: type[Exception],
        /,
    ) -> None: ...
    def apply(
        self,
        received: bytes,
        position: int,
        end: int,
        answers: list[bytes],
        pending: list[bytes],
        touched: list[Any],
        group: int,
        cas_floor: int,
        json: int,
        value_bytes_max: int,
        form: int,
        now_s: int,
        expiring: list[bytes],
        room_bytes: int,
        observed: list[int],
        missing: bytes,
        exists: bytes,
        /,
    ) -> tuple[int, int]:
        """Apply the plain changes from `position` on, and append their answers and entries, and to
        `expiring` the entries that expire. `form` has the bits of key_form.h. `missing` and
        `exists` are the answers of those that are refused, but for opcode and opaque. `observed`
        gets partition and group of what these wait for.

        Return the position of the first request that is for Python, and how many bytes the entries
        have that were made of present values; the run ends when these are `room_bytes`.
        """

class GroupRun:
    """Applies commit groups of a master on a replica."""

    def __init__(
        self,
        partitions: list[Any],
        presumed: dict[int, list[bytes]],
        link: Callable[[Any, bytes], bytes],
        apply_other: Callable[[tuple[int, bytes, bytes, int, int, int, bool]], None],
        /,
    ) -> None: ...
    def apply(
        self,
        payload: bytes,
        highs: dict[int, int],
        epochs: dict[int, int],
        body_bytes_max: int,
        pending: list[bytes],
        touched: list[Any],
        group: int,
        /,
    ) -> dict[int, int] | None:
        """Check all entries of a group, then apply them. Return partition -> end seqno, and raise
        `highs` to that. None: Python should do it, or say what is wrong; nothing was changed.
        """

class GetRun:
    """Answers plain GETs."""

    def __init__(
        self,
        partitions: list[Any],
        trees: Callable[[], tuple[KeyTree, KeyTree] | None],
        keep: Callable[[Any, bytes, bytes], None],
        damaged: type[Exception],
        /,
    ) -> None: ...
    def answer(
        self,
        received: bytes,
        position: int,
        end: int,
        answers: list[bytes],
        known_datatypes: int,
        now_s: int,
        committed_group: int,
        room_bytes: int,
        form: int,
        miss: bytes,
        /,
    ) -> tuple[int, int, int, int, int]:
        """Answer the plain GETs from `position` on, until their values have more than `room_bytes`.
        Append an item for each answer: the first one has the bytes of many, and these are empty.
        A quiet GET without a document has no answer. `form` has the bits of key_form.h, and `miss`
        is the text for a key that does not exist.
        Return the position of the first request that is for Python; how many were answered; how
        many of these were in the item cache, and in the store or nowhere; and the bytes of their
        values.
        """

class KeyTree:
    """Looks up keys in a table of LMDB's file, in one committed state that does not change."""

    def __init__(
        self,
        file: memoryview,
        page_bytes: int,
        last_page: int,
        depth: int,
        root: int,
        sums: memoryview | None = None,
        transaction: int = 0,
        /,
    ) -> None:
        """With `sums` (vbucket.store.lmdb.page_sums) each page of the state of this transaction is
        compared with its checksum once. Raises ValueError if this is no tree.
        """

    def unsound(self, keys: list[bytes], /) -> list[bytes]:
        """Return the keys on whose way a page is damaged."""

    def get(self, key: bytes, /) -> bytes | bool | None:
        """Return the value of a key; None: it is not there; False: a page is damaged."""

    def unproven(self, prefix: bytes, keys: list[bytes], /) -> list[bytes]:
        """Return the keys for which no sound record of a document is found in `by_key`."""

    def rows_of(
        self, prefix: bytes, keys: list[bytes], is_new: bool = False, /
    ) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Return the sound records of `by_key` that these keys have, as rows, and the keys of which
        it is not proven whether there is one. `is_new`: this object is of a transaction under way,
        so pages that were compared prove it; else they are compared again.
        """

    def within(
        self, first: bytes, stop: bytes, records: int, wanted: bytes, bits: int, prefix_at: int,
        prefix: bytes, cas_at: int, rev_at: int, opcode: int, /,
    ) -> tuple[list[tuple[bytes, bytes]], bytes | None] | None:  # fmt: skip
        """Read some records of `by_key` from `first` to below `stop`. Return the rows of documents
        whose bucket is wanted, 4,096 at most, and the key to go on from (None: all were read).

        Return None if a page or a record is damaged.
        """

    def add_hashes(
        self, first: bytes, stop: bytes, records: int, sums: bytearray, bits: int, prefix_at: int,
        prefix: bytes, cas_at: int, rev_at: int, opcode: int, /,
    ) -> tuple[int, bytes | None] | None:  # fmt: skip
        """Read records as `within` does, and add the hashes of documents to the sums of their
        buckets. Return how many there were, and the key to go on from (None: all were read).

        Return None if a page or a record is damaged; the sums mean nothing then.
        """

class LiveRun:
    """Cuts snapshots of live streams: once for all streams that get the same."""

    def __init__(
        self, stream: type, part: type, layer: type, tally: type, caught_up: object,
        waits_for_cut: object, replica: object, /,
    ) -> None:  # fmt: skip
        """Takes the classes of streams, partitions, their layers and tallies, which have slots; and
        the states of a stream that has caught up, of one that waits at a cut, and of a partition
        that is a copy.
        """

    def send(
        self, ready: deque[Any], partitions: list[Any], committed_group: int, bytes_max: int,
        turn_bytes: int, form: int, out: list[Any],
        cut: tuple[list[int], set[Any], list[Any]] | None, /,
    ) -> tuple[int, int]:  # fmt: skip
        """Move streams from the front of `ready` to the end of what is committed, and append to
        `out` for each its marker, changes and, if `form` has the flag 0x100, SNAPSHOT_END. Return
        the bytes and the seqnos. It ends before a stream that is for Python, which has not changed.

        `cut`: `seqnos`, `behind` and `waiting` of the pending cut. No stream goes beyond; one that
        is there leaves `behind`, and one that has more is in `waiting` then.

        Messages are shorter than `turn_bytes` each, and than `bytes_max` together. With the flag
        0x200 of `form`, streams of everything get changes of all collections. The other flags are
        those of `SnapshotWriter.plain`.
        """

class LogThread:
    """A thread that writes and syncs one thing at a time, without the interpreter lock. Linux only.

    `done_fd` gets eight bytes whenever a write is done (an eventfd).
    """

    def __init__(self, done_fd: int, /) -> None:
        """Raises OSError if no thread can be started."""

    def give(self, fd: int, sync_fd: int, data: bytes | memoryview, at: int, /) -> None:
        """Have `data` written to `fd` from position `at` on, and then `sync_fd` synced. Nobody may
        change the data before `take`. Raises ValueError if the last result was not taken.
        """

    def take(self) -> tuple[bool, int, int, int]:
        """Return of a write that is done: whether all was written, or else the errno of the write;
        the errno of the sync, 0 if it succeeded; and its nanoseconds. Raises ValueError if none is
        done.
        """

    def wait(self, seconds: float, /) -> bool:
        """Wait until nothing is being written; return whether that is so."""

    def close(self, seconds: float, /) -> bool:
        """End the thread, after what it was given; return whether it has ended in time. If not, the
        disk does not answer: what it holds is never freed.
        """

class Staged:
    """Entries of the log, by partition. Partitions must be open."""

    entries: int
    """How many were added."""

    def __init__(self) -> None: ...
    def open(self, vb_id: int, /) -> bool:
        """Open a partition; False: there is none with this number."""

    def add(self, payload: bytes, at: int, /) -> int:
        """Add the entries of a group from position `at` on. Return the position of the first one
        that is a control entry, or of a partition that is not open; or the payload's length; or -1
        if the entries' lengths do not add up.
        """

    def close(self, vb_id: int, /) -> list[bytes]:
        """Return the entries of a partition, and forget them."""

    def newest(self, vb_id: int, /) -> list[bytes] | None:
        """Find the newest entry of each key. Return which full keys (partition and key, ascending)
        may have a record in the store. None: Python should merge this partition.
        """

    def merge(
        self,
        vb_id: int,
        found: list[tuple[bytes, bytes]],
        tail: tuple[bytes, bytes] | None,
        last_seqno: int,
        body_bytes_target: int,
        other_high_seqno: int,
        default_high_seqno: int,
        /,
    ) -> Merged | None:
        """Return what a merge writes. `found` are the records of the keys of `newest` that exist,
        in the same order; `tail` is the partition's last block, which ends at `last_seqno`. The
        other two seqnos are those of `vbucket.model.collection_counts`. None: Python should merge
        this partition.
        """

Merged = tuple[
    list[tuple[bytes, bytes]],
    list[tuple[bytes, bytes]],
    list[tuple[bytes, int, int]],
    int,
    int,
    int,
    int,
    int,
    tuple[int, int, list[tuple[int, int, int]]],
]
"""by_key records; blocks; (full key, old expiry, new expiry) where it changes; more keys; more
documents in the default collection; the last seqno; the highest CAS of the entries; how many
entries; and for `CollectionCounts.take`: both seqnos, (id, high seqno, more documents)."""

class JsonScan:
    """See `dcp.session.subdoc.json_scan`."""

    def __new__(
        cls,
        text: bytes | memoryview,
        paths: tuple[tuple[bytes | int, ...], ...],
        wanted: tuple[bytes | None, ...],
        levels_max: int,
        checks_utf8: bool,
        /,
    ) -> JsonScan: ...
    depth: int
    """See there."""

    def step(self, bytes_max: int, /) -> int:
        """See there."""

    def places(self, number: int, /) -> list[tuple[int, int, int, int, bool, bool]]:
        """See there."""
