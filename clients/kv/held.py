"""What an application holds of the documents that it follows, for a comparison by hashes. Pure.

    class Table(Held):
        def documents(self, vb_id):
            rows = db.execute("SELECT key, cas, revision FROM documents WHERE vb = ?", (vb_id,))
            return (HeldDocument(*row) for row in rows)

    Consumer(server, held=Table(), on_rollback="restart")

A consumer asks only about a partition of which all earlier events are processed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from struct import error as StructError  # noqa: N812 - the struct module names its error in lower case
from typing import Final, NamedTuple

from clients.kv.differences import hashes_of, version_of
from dcp.wire.hash_reads import KeyVersion
from vbucket.native.key_hashes import KeyHashes, Row, RowForm, rows_of_buckets

ROW: Final = Struct(">QQ")
"""CAS and revision of a document, as rows that are compared have them."""
ROW_FORM: Final = RowForm(0, b"", 0, 8)


class HeldDocument(NamedTuple):
    """A document that an application holds: which one, and which version of it."""

    key: bytes
    """Without the collection id, as events have it."""
    cas: int
    rev_seqno: int
    collection_id: int = 0


class Held(ABC):
    """What an application holds, by partition (option `held` of a Consumer).

    An application that keeps hashes itself also overrides `hashes` and `within`, as a Mirror does.
    """

    @abstractmethod
    def documents(self, vb_id: int) -> Iterable[HeldDocument]:
        """Return the documents of a partition that are held, without deleted ones, in any order.

        It is called on the thread of the consumer, and for a partition that differs twice.
        """

    def holds(self, vb_id: int) -> bool:
        """Whether anything is held of a partition."""
        return any(True for _ in self.documents(vb_id))

    def hashes(self, vb_id: int) -> Mapping[int, KeyHashes]:
        """Return the hashes of a partition's documents by collection id."""
        rows = self._rows(vb_id)
        return {collection_id: hashes_of(some, ROW_FORM) for collection_id, some in rows.items()}

    def within(
        self,
        vb_id: int,
        collection_id: int,
        buckets: tuple[int, bytes],
        known: Sequence[KeyVersion],  # noqa: ARG002 - those who look keys up use it
    ) -> list[KeyVersion]:
        """Return what is held in some buckets: bits, and a byte for each of 2^bits, 1 if it is
        wanted. `known`: what the server has there.
        """
        rows = rows_of_buckets(self._rows(vb_id)[collection_id], ROW_FORM, *buckets)
        return [version_of(row, ROW_FORM) for row in rows]

    def _rows(self, vb_id: int) -> dict[int, list[Row]]:
        """Return rows as they are hashed, by collection id. Raises ValueError."""
        found: dict[int, list[Row]] = defaultdict(list)
        for each in self.documents(vb_id):
            if not isinstance(each.key, bytes):
                raise _unusable(vb_id, each, "its key must be bytes, as events have it")
            try:
                version = ROW.pack(each.cas, each.rev_seqno)
            except StructError:
                raise _unusable(
                    vb_id, each, "its CAS and revision must be numbers from 0 to 2^64 - 1"
                ) from None
            found[each.collection_id].append((each.key, version))
        return found


def _unusable(vb_id: int, each: HeldDocument, why: str) -> ValueError:
    return ValueError(f"held: of partition {vb_id} there is {each!r}: {why}")
