"""Whose records are in a metadata store: recognises a store of another cluster. Pure.

    <base><cluster id>/...     every key of a cluster

Who calls it: a node at its start, before it follows records. A store can be the wrong one: a URL of
another installation, or one that was made anew.
"""

from __future__ import annotations

from failover.metadata.metastore import Range, Txn, TxnResult


def owner_read(base: bytes, cluster: str) -> Txn:
    """Return the transaction whose result `owner_trouble` judges."""
    return Txn(
        then=(
            Range(_root(base, cluster), is_prefix=True, limit=1),
            Range(base, is_prefix=True, limit=1),
        )
    )


def owner_trouble(result: TxnResult, base: bytes, cluster: str) -> str:
    """Say in one line that the store is not this cluster's; empty if it is."""
    ours, any_cluster = result.ranges
    if ours.items:
        return ""
    place = f"the metadata store has no records of cluster {cluster} below {_text(base)}"
    advice = "Correct the address of the store, or join that cluster with an empty data folder"
    if not any_cluster.items:
        return f"{place}, and none of any other: it is another store, or was emptied. {advice}"
    other = any_cluster.items[0].key.removeprefix(base).partition(b"/")[0]
    return f"{place}, but of cluster {_text(other)}: it is the store of another cluster. {advice}"


def _root(base: bytes, cluster: str) -> bytes:
    assert base.endswith(b"/")
    return base + cluster.encode() + b"/"


def _text(key: bytes) -> str:
    return key.decode("utf-8", "replace")
