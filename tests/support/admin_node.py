"""A small version of what the admin interface needs of a node, to test its port and application."""

from __future__ import annotations

import asyncio
import http
import json
import logging
from types import SimpleNamespace

from dcp.server.access.access import Access
from dcp.server.config.settings import Settings
from dcp.server.config.sources import LiveSettings
from dcp.server.observe.event_log import EventLog
from dcp.server.observe.meter import Meter
from dcp.server.operate.collection_changes import CollectionsRefusedError
from dcp.session.faults import FaultError
from vbucket.engine.lifecycle import PurgeRefusedError
from vbucket.engine.partition import BranchRefusedError
from vbucket.store.environment import StoreDamagedError

GUEST = "guest:guest"
CONFIG = {
    "rev": 1,
    "uuid": "00",
    "bucketType": "membase",
    "nodes": [{"hostname": "$HOST:8091", "ports": {"direct": 11210}}],
    "nodesExt": [{"services": {"mgmt": 8091, "kv": 11210}}],
    "vBucketServerMap": {"numReplicas": 0},
}


class SmallCollections:
    """Records its calls."""

    def __init__(self):
        self.told = []

    def manifest(self):
        return {"uid": "a", "scopes": []}

    async def create_scope(self, scope):
        self.told.append(("create", scope))
        if scope == "taken":
            raise CollectionsRefusedError(http.HTTPStatus.CONFLICT, "there is one already")
        return 10

    async def drop_scope(self, scope):
        self.told.append(("drop", scope))
        return 11

    async def create_collection(self, scope, collection, max_ttl_s):
        self.told.append(("create", scope, collection, max_ttl_s))
        return 12

    async def change_max_ttl(self, scope, collection, max_ttl_s):
        self.told.append(("change", scope, collection, max_ttl_s))
        return 14

    async def drop_collection(self, scope, collection):
        self.told.append(("drop", scope, collection))
        return 13


class SmallOperations:
    """Records its calls."""

    def __init__(self):
        self.told = []

    async def branch(self, vb_id, at_seqno):
        await asyncio.sleep(0)
        if at_seqno == 6:
            raise StoreDamagedError("a block of partition 5")
        if at_seqno > 10:
            raise BranchRefusedError(f"partition {vb_id} ends at seqno 10")
        self.told.append((vb_id, at_seqno))
        return {"vb": vb_id, "seqno": at_seqno}

    async def failover(self, vb_id, lost_seqnos):
        if lost_seqnos > 10:
            raise BranchRefusedError("it has 10")
        self.told.append(("failover", vb_id, lost_seqnos))
        return {"vb": vb_id}

    async def set_state(self, vb_id, state):
        self.told.append((vb_id, state))
        return {"state": state.name}

    async def purge(self, vb_id, upto_seqno):
        if upto_seqno == 10:
            raise PurgeRefusedError("never the last")
        self.told.append(("purge", vb_id, upto_seqno))
        return {"purge_seqno": upto_seqno}

    async def explain(self, vb_id, question):
        self.told.append((vb_id, question))
        return {"answer": "OK"}

    def streams(self, choice):
        self.told.append(choice)
        return [{"name": "x"}]

    def stream_limits(self):
        return []

    def end_streams(self, choice, reason):
        self.told.append((choice, reason))
        return 0 if choice.name == "nobody" else 2

    def limit_streams(self, choice, bytes_per_s):
        self.told.append((choice, bytes_per_s))
        return 1

    def drop_connections(self, choice):
        self.told.append(("drop", choice))
        return 1

    def faults(self):
        return []

    def set_fault(self, **rule):
        self.told.append(rule)
        if rule["delay_ms"] == 7:
            raise FaultError("not 7")
        return {"id": 1}

    def clear_faults(self, fault_id=None):
        self.told.append(("clear", fault_id))
        return 0 if fault_id == 9 else 1


class Refusals(list):
    """Records what would be logged: (event, host, status, reason)."""

    def write(self, event, peer_host, **fields):
        self.append((event, peer_host, fields.get("status"), fields["reason"]))


class SmallNode:
    """Small `AdminParts` of a server. It is some of the parts itself."""

    def __init__(self, users, data):
        self.users = users
        self.settings = Settings(data=data, audit="off")
        self.live = LiveSettings(self.settings)
        self.live.follow("log_level", lambda _level: None)
        self.log = EventLog(logging.getLogger())
        self.access = Access(self.settings, users, self.log)
        self.is_ready = True
        self.refusal_kind = self.unready_kind = ""
        self.is_broken = False
        self.page = lambda by_vbucket: b"dcpd_vb 1\n" if by_vbucket else b"dcpd_items 3\n"
        """What /metrics answers. The routes take `metrics` once, so tests replace this."""
        self.operations = SmallOperations()
        self.collections = SmallCollections()
        self.version = (1, 1)
        self.bucket, self.num_vbuckets = "default", 1024
        self.refusals = Refusals()
        self.meter = Meter()
        self.dumps = self.backups = self.consumers = self.scrubbing = None
        self.cluster = None
        self.console = SimpleNamespace(
            view=None,
            engine=None,
            brief=None,
            sampler=None,
            documents=None,
            is_test_mode=False,
            allows_faults=True,
        )  # fmt: skip
        self.health = self.config = self

    def status(self):
        if self.is_broken:
            raise KeyError("a fault")
        return {"version": "test", "items": 3}

    def metrics(self, *, by_vbucket, is_openmetrics):
        if is_openmetrics:
            return b"# EOF\n"
        return self.page(by_vbucket)

    def users_changed(self):
        pass

    def bucket_config(self):
        return json.dumps(CONFIG | {"rev": self.version[1]}).encode()

    def global_config(self):
        return b'{"nodesExt":[]}'

    def admin_elsewhere(self, vb_id, *, is_tls):
        return ""

    def config_version(self):
        return self.version
