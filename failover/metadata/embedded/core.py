"""The embedded store between its file and its connections: what is answered when. Pure.

Who calls it: the embedded store's server. A request that changes nothing is answered at once. One
that changes something is answered after its record is on disk:

    answer_now(request) is None -> record_of(request) -> append and sync it -> carry_out(request)

The time of leases is kept here, and no lease ends without a record (a LeaseRevoke). After a restart
each lease has its whole time again. Time in which the store itself stood still does not count.

Invariants
- what a client can read is on disk
- the store's state is that of its records, in their order: a replay gives the same state
- each lease has a deadline here
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from failover.metadata.metastore import (
    Compact,
    LeaseGrant,
    LeaseKeepAlive,
    LeaseResult,
    LeaseRevoke,
    StoreRequest,
    StoreResult,
)
from failover.metadata.revision_store import RevisionStore
from failover.metadata.store_codec import (
    CodecError,
    decode_image,
    decode_request,
    encode_image,
    encode_request,
)
from vbucket.model.ids import Draws

HISTORY_BYTES_MAX: Final = 8 << 20
"""How much history is kept for watches that resume: hours of a cluster that changes much. A watch
that comes later reads everything again."""
STANDSTILL_NS: Final = 300_000_000
"""If no tick came for so long, three of them, the store stood still. Its leases get that time back,
because it could not hear the keep-alives."""
_NS_PER_S: Final = 1_000_000_000
_REVISION: Final = struct.Struct(">Q")
_TIME: Final = 0
"""What the revision store is given as the time: it ends no lease by itself."""


class ReplayError(Exception):
    """A record does not fit the records before it; the text says how."""


LEASE_ID_BITS: Final = 62


class EmbeddedCore:
    """See the module. `draws` gives leases random ids: none is used twice."""

    def __init__(self, store: RevisionStore, now_ns: int, draws: Draws) -> None:
        self.store: Final = store
        self._draws = draws
        self._last_tick_ns = now_ns
        self._deadlines_ns = {
            lease_id: now_ns + ttl_s * _NS_PER_S for lease_id, ttl_s in store.leases().items()
        }

    # ---- Requests

    def answer_now(self, now_ns: int, request: StoreRequest) -> StoreResult | None:
        """Answer a request that needs no record; None for the others."""
        if isinstance(request, LeaseKeepAlive) and self._is_overdue(now_ns, request.lease_id):
            return None  # its end may be on its way to the disk: wait for that
        if self.store.will_change(request):
            return None
        return self.carry_out(now_ns, request)

    def with_lease_id(self, request: StoreRequest) -> StoreRequest:
        """Give a new lease its id, so that a replay gives it the same one."""
        if isinstance(request, LeaseGrant) and not request.lease_id:
            return request._replace(lease_id=self._draws.getrandbits(LEASE_ID_BITS))
        return request

    def record_of(self, request: StoreRequest) -> bytes:
        """Return the record of a request that will change something."""
        return _REVISION.pack(self.store.revision) + encode_request(request)

    def carry_out(self, now_ns: int, request: StoreRequest) -> StoreResult:
        """Carry out a request, whose record is on disk if it needs one."""
        result = self.store.apply(_TIME, request)
        if isinstance(result, LeaseResult):
            self._deadlines_ns[result.lease_id] = now_ns + result.ttl_s * _NS_PER_S
        elif isinstance(request, LeaseRevoke):
            self._deadlines_ns.pop(request.lease_id, None)
        return result

    # ---- Time

    def tick(self, now_ns: int) -> None:
        """Let time pass; call it several times a second."""
        passed_ns = now_ns - self._last_tick_ns
        self._last_tick_ns = now_ns
        if passed_ns >= STANDSTILL_NS:
            for lease_id in self._deadlines_ns:
                self._deadlines_ns[lease_id] += passed_ns

    def next_overdue(self) -> LeaseRevoke | None:
        """Return the request that ends the lease that ran out first; None if none has."""
        if not self._deadlines_ns:
            return None
        lease_id = min(self._deadlines_ns, key=self._deadlines_ns.__getitem__)
        is_over = self._is_overdue(self._last_tick_ns, lease_id)
        return LeaseRevoke(lease_id) if is_over else None

    def _is_overdue(self, now_ns: int, lease_id: int) -> bool:
        return self._deadlines_ns.get(lease_id, now_ns + 1) <= now_ns

    # ---- Snapshots

    def snapshot(self) -> bytes:
        """Drop history that is too long, and return all that is left."""
        revision = self.store.revision_with_history_of(HISTORY_BYTES_MAX)
        if self.store.will_change(Compact(revision)) and revision > 1:
            self.store.apply(_TIME, Compact(revision))
        return encode_image(self.store.image())


def replayed(snapshot: bytes, records: Iterable[bytes]) -> RevisionStore:
    """Return the store of a snapshot and the records after it.

    Raises:
        ReplayError: a record is of another store, or of a version that knows more.
    """
    try:
        store = RevisionStore.of_image(decode_image(snapshot))
        for number, record in enumerate(records):
            (revision,) = _REVISION.unpack_from(record)
            if revision != store.revision:
                raise ReplayError(
                    f"record {number} follows revision {revision}, but the records before it lead"
                    f" to revision {store.revision}"
                )
            store.apply(_TIME, decode_request(record[_REVISION.size :]))
    except (CodecError, struct.error) as error:
        raise ReplayError(str(error)) from None
    return store
