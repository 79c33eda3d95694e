"""The kind `restored store`: the metadata store goes back to a copy while clients write.

Three nodes and an etcd. A copy of etcd's data is made; then nodes die, or go on, and the copy is
put back. Whoever comes back first may answer nothing that is out of date. After `dcpctl cluster
meta restore` all copies are in sync, and each answered document is there.
"""

from __future__ import annotations

import shutil
import time
from typing import Final

from clients.address import parse_address
from clients.errors import DcpdError
from clients.kv.sync_client import SyncKv
from support.server import ClusterProcesses
from tests.soak.attack.case import Case, Fault, NotRunError
from tests.soak.attack.starved import COPIES, NAMES, Writer, check_documents, wait
from tests.soak.cluster.meta import SavedStore, run_restore

READ_S: Final = 2.0
"""How long a read may take from a node that may serve nothing."""
READS: Final = 20


def run(case: Case) -> None:
    if shutil.which("etcd") is None:
        raise NotRunError("there is no etcd")
    store = SavedStore(case.folder / "etcd")
    try:
        meta = ("--cluster-meta", f"etcd://{store.etcd.endpoints[0]}")
        with ClusterProcesses(case.folder, NAMES, *meta) as cluster:
            wait(lambda: cluster.are_in_sync(COPIES), "a new cluster")
            _Restored(case, cluster, store).run()
    finally:
        store.etcd.close()


class _Restored:
    """One case."""

    def __init__(self, case: Case, cluster: ClusterProcesses, store: SavedStore) -> None:
        self.case, self.cluster, self.store = case, cluster, store
        draw = case.draw
        self.behind = draw.choice(NAMES)
        others = [name for name in NAMES if name != self.behind]
        self.dying = others[: draw.choice((0, 1, 2, 2))]
        case.note(f"{self.behind} is left behind, {'+'.join(self.dying) or 'nobody'} dies")

    def run(self) -> None:
        cluster, store, case = self.cluster, self.store, self.case
        addresses = ",".join(node.address for node in cluster.nodes.values())
        writer = Writer(f"dcpd://{addresses}")
        writer.start()
        try:
            store.save()
            wait(lambda: cluster.are_in_sync(COPIES), "after etcd was saved")
            cluster.nodes[self.behind].kill()
            wait(self.is_left_out, f"{self.behind} was killed")
            time.sleep(case.seconds(1.0, 8.0))
            for name in self.dying:
                cluster.nodes[name].kill()
            store.stop()
            store.restore()
            store.start()
            if len(self.dying) == len(NAMES) - 1:
                writer.end()  # nobody answers: what it waits for ends with its patience
            cluster.nodes[self.behind].start()
            time.sleep(case.seconds(4.0, 10.0))
            self.read_from_behind(writer)
            for name in self.dying:
                cluster.nodes[name].start()
            wait(self.is_restored, "after the store went back")
        finally:
            writer.end()
        check_documents(case, cluster, writer)

    def is_left_out(self) -> bool:
        """Whether the node that is down is in no in-sync set."""
        name = self.cluster.running()[0]
        members = {each["name"]: each["in_sync"] for each in self.cluster.status(name)["nodes"]}
        return not members[self.behind]

    def is_restored(self) -> bool:
        """Whether all copies are in sync; build the records anew where nodes say that it takes
        that.
        """
        if self.cluster.status(self.behind)["store"]["older_since_ms"] is not None:
            run_restore(self.cluster, "--yes")
        return self.cluster.are_in_sync(COPIES)

    def read_from_behind(self, writer: Writer) -> None:
        """Read from the node that was left out: it answers what is right, or nothing."""
        sure = sorted(writer.answered.keys() - writer.unknown)[:READS]
        address = parse_address(self.cluster.nodes[self.behind].address)
        with SyncKv(address, timeout_s=READ_S) as kv:
            for key in sure:
                before = writer.answered[key]
                try:
                    found = kv.get(key).value
                except DcpdError:
                    return  # it serves nothing
                if found not in {before, writer.answered[key]} and key not in writer.unknown:
                    self.case.find(Fault.WRONG, f"{key!r} is {found[:40]!r} after {before!r}")
