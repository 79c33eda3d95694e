"""Replaces a record of the whole cluster that any node changes: its users, its collections.

Invariants
- a change compares the record that it was made from, so it happens once at most
- a change whose answer is lost is asked for again: the same compare fails if it has happened, and
  the record that is found then tells whose it is. Who else wrote the same did what was asked for
- a change that may have happened, or may still happen, is not reported as refused
"""

from __future__ import annotations

import asyncio
from typing import Final

from dcp.server.cluster.enrolment import AGAIN_S, EnrolmentError, ask
from failover.metadata.metastore import (
    KeyValue,
    MetaStore,
    OutcomeUnknown,
    Put,
    Range,
    StoreRefused,
    StoreResult,
    Txn,
    TxnResult,
    if_unchanged,
)

TRIES_MAX: Final = 3
"""Attempts of a change whose answers are lost, before the outcome is told as unknown. The client
of a store gives each of them 0.8 s."""


class NotReplacedError(Exception):
    """The record was not replaced; the text says why."""


class MayBeReplacedError(Exception):
    """Nobody knows whether the record was replaced, or will be; the text says why."""


async def replace_record(
    meta: MetaStore, key: bytes, value: bytes, before: KeyValue | None
) -> bool:
    """Replace a record that was `before` (None: absent). False: another node has changed it, and it
    was not replaced. Raises NotReplacedError, MayBeReplacedError.
    """
    revision, version = (0, 0) if before is None else (before.mod_revision, before.version)
    txn = Txn((if_unchanged(key, revision),), (Put(key, value),), (Range(key),))
    unknown = ""
    for tries_left in reversed(range(TRIES_MAX)):
        result = await _asked(meta, txn)
        if isinstance(result, TxnResult):
            if result.succeeded:
                return True
            found = result.ranges[0].items
            if not unknown or not found:
                return False
            if found[0].value == value:
                return True
            if found[0].version == version + 1:
                return False  # the one change since then is another's
            raise MayBeReplacedError(f"{unknown}; others have changed it since then")
        if isinstance(result, OutcomeUnknown):
            unknown = result.text
        elif not unknown:
            raise NotReplacedError(_refusal(result))
        if tries_left:
            await asyncio.sleep(AGAIN_S)
    raise MayBeReplacedError(unknown)


async def _asked(meta: MetaStore, txn: Txn) -> StoreResult:
    try:
        return await ask(meta, txn)
    except EnrolmentError as error:
        return OutcomeUnknown(error.why)


def _refusal(result: StoreResult) -> str:
    told = "refuses this" if isinstance(result, StoreRefused) else "does not answer"
    return f"the metadata store {told}: {getattr(result, 'text', result)}"
