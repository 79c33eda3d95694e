"""A writer whose every value says how many came before."""

from __future__ import annotations

from failover.metadata.metastore import (
    MetaStore,
    OutcomeUnknown,
    Put,
    StoreUnavailable,
    Txn,
    TxnResult,
)


class CountingWriter:
    """Writes 1, 2, 3 ... to a key, each when the one before has ended."""

    def __init__(self, client: MetaStore, key: bytes) -> None:
        self.client = client
        self.key = key
        self.sent = 0
        self.answered = 0
        self.is_stopped = False
        self.next()

    def next(self) -> None:
        self.sent += 1
        self.client.submit(Txn(then=(Put(self.key, b"%d" % self.sent),)), self.done)

    def done(self, result) -> None:
        if isinstance(result, TxnResult):
            self.answered = self.sent
        else:
            assert isinstance(result, OutcomeUnknown | StoreUnavailable)
        if not self.is_stopped:
            self.next()
