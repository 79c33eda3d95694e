"""Range scans: the documents of one collection in one partition, in batches that a client asks for.

A node has one table of scans, which the sessions use (`dcp.session.kv.scans`). Pure: random ids are
handed in.

Invariants
- a scan shows the state as of the seqno at which it was made, or ends with an error;
- a scan belongs to the connection that used it last, and ends with it. Other users cannot use it;
- every scan has one view. `vbucket.engine.read_view` limits how many there are, whose they are,
  their age and what they pin. A scan whose view was closed says why when it is asked again, unless
  there are more such scans than views.

Rules: kv_engine's. A scan without documents is not made. Keys are sent without their collection's
id. Documents that are due to expire are left out.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

from vbucket.engine.read_view import STEP_BYTES, STEP_WORK, Scan, Shown, Views
from vbucket.model.ids import Draws

BATCH_WORK: Final = 2 * STEP_WORK
"""Keys and versions that one request looks at, which takes some milliseconds. A client asks again
for more."""
BATCH_DOCUMENTS: Final = BATCH_WORK
_HASH_RANGE: Final = 2**64


class Sample(NamedTuple):
    """Chooses a random sample: about `size` of `documents` documents, never more than `size`."""

    size: int
    documents: int
    seed: int

    def takes(self, key: bytes) -> bool:
        """Return whether a key is in the sample. The same seed chooses the same keys."""
        seed = (self.seed % _HASH_RANGE).to_bytes(8, "big")
        number = int.from_bytes(blake2b(key, digest_size=8, key=seed).digest(), "big")
        return number * self.documents < self.size * _HASH_RANGE


class RangeScan:
    """One scan. `owner` is the connection that it belongs to."""

    def __init__(
        self,
        scan: Scan,
        owner: object,
        user: str | None,
        collection_id: int,
        *,
        is_key_only: bool,
        now_s: int,
        excluded: bytes = b"",
        sample: Sample | None = None,
    ) -> None:
        self.scan = scan
        self.view = scan.view
        self.owner = owner
        self.user = user
        self.collection_id = collection_id
        self.is_key_only = is_key_only
        self._now_s = now_s
        self._excluded = excluded
        """A key to leave out: the excluded end of the range."""
        self._sample = sample
        self._left = None if sample is None else sample.size
        self._waiting: list[Shown] = []
        """Documents that `look_ahead` found and no request has returned yet."""

    @property
    def is_done(self) -> bool:
        """Whether everything was returned."""
        return not self._waiting and (self.scan.is_done or self._left == 0)

    def look_ahead(self) -> bool:
        """Look for the first document; False: there is none."""
        self._waiting = self.batch(1, STEP_BYTES)
        return bool(self._waiting) or not self.is_done

    def batch(self, documents_max: int, bytes_max: int) -> list[Shown]:
        """Return the next documents, up to `documents_max` or what BATCH_WORK finds.

        Raises ViewInvalidError, StoreDamagedError.
        """
        found = self._waiting
        self._waiting = []
        bytes_max -= sum(map(_size, found))
        work_left = BATCH_WORK
        while len(found) < documents_max and bytes_max > 0 and work_left > 0 and not self.is_done:
            for shown in self.scan.step(1, work_left, bytes_max):
                if self._take(shown):
                    found.append(shown)
                    bytes_max -= _size(shown)
            work_left -= self.scan.last_work
        return found

    def _take(self, shown: Shown) -> bool:
        if 0 < shown.meta.expiry <= self._now_s or shown.key == self._excluded:
            return False
        if self._sample is not None:
            if not self._sample.takes(shown.key):
                return False
            assert self._left is not None
            self._left -= 1
        return True


class RangeScans:
    """The scans of a node, by id."""

    def __init__(self, views: Views, draws: Draws) -> None:
        self.views = views
        self._draws = draws
        self._scans: dict[bytes, RangeScan] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._scans)

    def add(self, scan: RangeScan) -> bytes:
        """Keep a scan; return its id, 16 bytes that cannot be guessed."""
        if len(self._scans) >= 2 * len(self.views):
            self._forget_closed()
        scan_id = self._draws.randbytes(16)
        assert len(scan_id) == 16
        self._scans[scan_id] = scan
        return scan_id

    def find(self, scan_id: bytes, vb_id: int, user: str | None) -> RangeScan | None:
        """Return a scan; None: this user has no scan with this id in this partition."""
        scan = self._scans.get(scan_id)
        if scan is None or scan.view.vb_id != vb_id or scan.user != user:
            return None
        return scan

    def end(self, scan_id: bytes) -> None:
        """Forget a scan."""
        self.views.close(self._scans.pop(scan_id).view)

    def _forget_closed(self) -> None:
        """Forget scans whose view was closed, and whose clients have not asked for them since."""
        self._scans = {key: scan for key, scan in self._scans.items() if scan.view in self.views}

    def leave(self, owner: object) -> None:
        """End the scans of a connection that is gone."""
        for scan_id in [key for key, scan in self._scans.items() if scan.owner is owner]:
            self.end(scan_id)


def _size(shown: Shown) -> int:
    return len(shown.key) + len(shown.value)
