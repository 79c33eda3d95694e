"""Which seed finds each planted fault first, which check names it, and how.

It is what `python -m tests.sim --bug all --seeds 400` prints. After a change of the simulator,
write down what it prints then.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Found(NamedTuple):
    """See the module. `words` are some of what is told."""

    seed: int
    check: str
    words: str


FOUND: Final = {
    "answers_before_sync": Found(1, "linearizable", "is not linearizable"),
    "streams_before_sync": Found(0, "committed first", "was committed"),
    "cuts_back_at_start": Found(4, "linearizable", "is not linearizable"),
    "forgets_answers": Found(0, "liveness", "was not answered"),
    "streams_other_values": Found(0, "same documents", "the master has"),
    "trusts_failed_syncs": Found(4, "problem", "refuses to start"),
    "hw-counts-received": Found(0, "in-sync", "in the in-sync set"),
    "old-epoch-counts": Found(1, "in-sync", "in the in-sync set"),
    "shrink-counts-early": Found(1, "in-sync", "in the in-sync set"),
    "joins-early": Found(32, "in-sync", "in the in-sync set"),
    "truncates-to-hw": Found(0, "receipts", "as cut off"),
    "no-version": Found(4, "histories", "has another change with seqno"),
    "handover-unchecked": Found(0, "histories", "has another change with seqno"),
    "old-record-believed": Found(62, "linearizable", "is not linearizable"),
    "forgets-seen": Found(0, "in-sync", "in the in-sync set"),
    "unseen-shrink": Found(0, "in-sync", "in the in-sync set"),
    "streams-show-synced": Found(0, "committed first", "was committed"),
    "reads-unconfirmed": Found(4, "one master", "at the same time"),
    "promoted-at-once": Found(45, "one master", "at the same time"),
    "applied-not-mine": Found(13, "linearizable", "is not linearizable"),
    "unknown-sent-again": Found(28, "in-sync", "in the in-sync set"),
    "deposed-keeps-streams": Found(7, "streams end", "stands still"),
    "older-is-told": Found(76, "links", "ends the connection of a replica"),
    "newest-is-chosen": Found(1, "problem", "changes are not committed"),
    "drops-early": Found(0, "problem", "were dropped"),
    "added-is-full": Found(1, "in-sync", "in the in-sync set"),
    "not-emptied": Found(0, "problem", "without a copy"),
    "old-copy-counts": Found(163, "in-sync", "in the in-sync set"),
    "fenced-are-told": Found(2, "histories", "has another change with seqno"),
    "touch-in-vain": Found(7, "expiry", "an expired document is answered"),
    "expiry-is-lost": Found(9, "expiry", "an expired document is answered"),
    "due-is-answered": Found(30, "expiry", "an expired document is answered"),
    "pages-anywhere": Found(1, "crash", "AssertionError"),
    "revision-again": Found(1, "problem", "the revision of"),
    "last-one-wins": Found(1, "problem", "the revision of"),
    "cas-of-the-clock": Found(1, "problem", "the CAS of"),
    "cas-unchecked": Found(1, "linearizable", "is not linearizable"),
    "pushed-first": Found(1, "linearizable", "is not linearizable"),
    "counts-from-initial": Found(1, "linearizable", "is not linearizable"),
    "appends-before": Found(5, "linearizable", "is not linearizable"),
    "replica-shows-newest": Found(16, "replica reads", "a replica answered what was not committed"),
    "drop-keeps-count": Found(23, "problem", "documents, and it counts"),
    "collection-id-again": Found(23, "problem", "the record says item_count"),
    "drop-untold": Found(67, "same documents", "the master has nothing"),
    "no-rollback": Found(4, "rollbacks due", "without a rollback"),
    "rollback-miscounts": Found(15, "problem", "documents, and it counts"),
    "folder-unsynced": Found(4, "problem", "refuses to start"),
    "log-unsynced": Found(5, "problem", "refuses to start"),
    "checksum-unread": Found(37, "problem", "refuses to start"),
    "seal-unsynced": Found(5, "problem", "refuses to start"),
    "deletes-unmerged": Found(1, "problem", "documents, and it counts"),
    "level-is-nothing": Found(17, "linearizable", "is not linearizable"),
    "timeout-is-success": Found(0, "linearizable", "is not linearizable"),
    "cut-of-committed": Found(4, "cuts", "and then received"),
    "cut-beyond": Found(4, "cuts", "and lacks what was answered before"),
    "cut-passed": Found(38, "problem", "a marker up to"),
    "cut-told-early": Found(4, "cuts", "and then received"),
    "cut-commits-on": Found(18, "cuts", "and lacks what was answered before"),
    "cut-meets-anywhere": Found(13, "cuts", "is not above that of the cut before"),
    "cut-closes-nothing": Found(4, "cuts", "is not above that of the cut before"),
    "cut-held-for-ever": Found(13, "problem", "20 s after the faults"),
    "cut-waits-for-clock": Found(139, "problem", "consumers do not catch up"),
    "scan-moves-on": Found(13, "crash", "not in list"),
    "scan-uncommitted": Found(4, "scans", "what was there at no moment"),
    "hashes-keep-old": Found(1, "problem", "are not those of its documents"),
    "hashes-miss-one": Found(13, "hashes", "and it counts"),
    "batch-one-by-one": Found(13, "linearizable", "is not linearizable"),
    "batch-lacks-last": Found(13, "linearizable", "is not linearizable"),
    "gap-is-read-over": Found(18, "crash", "MergeRefusedError"),
    "early-end-is-good": Found(84, "linearizable", "is not linearizable"),
    "repair-takes-all": Found(36, "repairs", "may take seqno"),
    "repair-takes-older": Found(18, "repairs", "its block is not what it was"),
    "hashes-at-once": Found(4, "hashes", "where it was not"),
    "damage-is-answered": Found(87, "linearizable", "is not linearizable"),
    "old-page-is-read": Found(51, "damages", "was not mended in time"),
    "damaged-is-absent": Found(24, "linearizable", "is not linearizable"),
    "block-passed-over": Found(12, "damages", "was not mended in time"),
    "copies-unasked": Found(6, "damages", "was not mended in time"),
    "repair-in-vain": Found(6, "damages", "it counts as mended"),
    "older-is-put": Found(6, "damages", "something else was put in its place"),
}
"""Bug -> how it is found."""
