"""What users of the official Couchbase SDK see while a node dies."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any, Final

THREADS: Final = 8
KEYS: Final = 512
"""Of each thread: most partitions have one of all."""
PATIENCE: Final = timedelta(seconds=10)


def longest_upsert_ms(address: str, seconds: float) -> float:
    """Write with the SDK for so long; return the longest time that a write took, tries included."""
    from couchbase.auth import PasswordAuthenticator
    from couchbase.cluster import Cluster
    from couchbase.options import ClusterOptions, ClusterTimeoutOptions

    timeouts = ClusterTimeoutOptions(kv_timeout=PATIENCE, kv_durable_timeout=PATIENCE)
    login = PasswordAuthenticator("guest", "guest")
    cluster = Cluster(f"couchbase://{address}", ClusterOptions(login, timeout_options=timeouts))
    cluster.wait_until_ready(PATIENCE)
    documents = cluster.bucket("default").default_collection()
    longest = [0.0] * THREADS
    until = time.monotonic() + seconds

    def write(number: int) -> None:
        turn = 0
        while time.monotonic() < until:
            began = time.monotonic()
            _written(documents, f"sdk-{number}-{turn % KEYS}", turn)
            longest[number] = max(longest[number], 1000 * (time.monotonic() - began))
            turn += 1

    writers = [threading.Thread(target=write, args=(number,)) for number in range(THREADS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    cluster.close()
    return max(longest)


def _written(documents: Any, key: str, turn: int) -> None:
    """Write until it is answered."""
    from couchbase.exceptions import CouchbaseException

    while True:
        try:
            documents.upsert(key, {"turn": turn})
        except CouchbaseException:  # ambiguous, or meant for the dead node: the SDK has given up
            continue
        return
