"""The official `couchbase` package through the death of a master, as its users would use it."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import Durability, ServerDurability
from couchbase.exceptions import (
    AmbiguousTimeoutException,
    RequestCanceledException,
    UnAmbiguousTimeoutException,
)
from couchbase.options import ClusterOptions, ClusterTimeoutOptions, UpsertOptions

from support.cluster_processes import ClusterProcesses
from support.waiting import until

pytestmark = [pytest.mark.foreign, pytest.mark.crash]
WRITERS = 4
DOCUMENTS = 150
PATIENCE = timedelta(seconds=8)


def test_durable_upserts_go_through_the_death_of_a_master(tmp_path: Path) -> None:
    timeouts = ClusterTimeoutOptions(kv_timeout=PATIENCE, kv_durable_timeout=PATIENCE)
    login = PasswordAuthenticator("guest", "guest")
    durable = UpsertOptions(durability=ServerDurability(Durability.MAJORITY))
    answered: dict[str, int] = {}
    unexpected: list[Exception] = []
    with ClusterProcesses(tmp_path) as nodes:
        nodes.until_in_sync(3)
        nodes.until_even()
        cluster = Cluster(
            f"couchbase://{nodes.nodes['a'].address}",
            ClusterOptions(login, timeout_options=timeouts),
        )
        cluster.wait_until_ready(PATIENCE)
        documents = cluster.bucket("default").default_collection()

        def write(number: int) -> None:
            for turn in range(DOCUMENTS):
                key = f"w{number}-{turn}"
                try:
                    documents.upsert(key, {"turn": turn}, durable)
                except (AmbiguousTimeoutException, RequestCanceledException):
                    continue  # it may have happened
                except UnAmbiguousTimeoutException:
                    continue  # meant for the dead node: the SDK keeps it, and does not send it
                except Exception as error:  # noqa: BLE001 - told below
                    unexpected.append(error)
                    return
                answered[key] = turn

        writers = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
        for writer in writers:
            writer.start()
        until(lambda: len(answered) > WRITERS * DOCUMENTS // 4)
        nodes.nodes["b"].kill()
        for writer in writers:
            writer.join()
        assert unexpected == []
        assert len(answered) > WRITERS * (DOCUMENTS - 10)
        for key, turn in answered.items():
            assert documents.get(key).content_as[dict] == {"turn": turn}
        found = [result.content_as[dict] for result in documents.get_all_replicas(key)]
        assert found == [{"turn": turn}] * 2, "the master's, and that of the replica that is left"
        cluster.close()
