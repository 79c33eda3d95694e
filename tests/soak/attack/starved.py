"""The kind `starved`: nodes of a cluster that run a tenth of the time, as on a busy machine.

One of three nodes, or all of them, get slices of a processor while a client writes. Perhaps one is
killed meanwhile. Nobody may be deposed who has not died; afterwards all copies are in sync, and
each answered document is there. How long a write waits meanwhile is not judged.
"""

from __future__ import annotations

import threading
import time
from typing import Final

from clients.address import parse_address
from clients.errors import DcpdError
from clients.kv.sync_client import SyncKv
from clients.testing import ServerRefusedError
from tests.soak.attack.case import AttackError, Case, Fault, traceback_in
from tests.soak.cluster.members import EmbeddedMembers

NAMES: Final = "abc"
COPIES: Final = 3
BACK_S: Final = 180.0
"""Time until all copies are in sync again, on a machine that does other things too."""
WRITE_S: Final = 60.0
LOOK_S: Final = 0.2


class Writer(threading.Thread):
    """Writes one document after another until `end`."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.answered: dict[bytes, bytes] = {}
        self.unknown: set[bytes] = set()
        self._address = address
        self._is_over = threading.Event()

    def run(self) -> None:
        with SyncKv(parse_address(self._address), timeout_s=WRITE_S) as kv:
            number = 0
            while not self._is_over.is_set():
                key, value = b"starved-%d" % (number % 500), b"v%d" % number
                number += 1
                try:
                    kv.set(key, value)
                except DcpdError:
                    self.unknown.add(key)
                else:
                    self.answered[key] = value

    def end(self) -> None:
        self._is_over.set()
        self.join()


def run(case: Case) -> None:
    with EmbeddedMembers(case.folder, NAMES) as cluster:
        wait(lambda: cluster.are_in_sync(COPIES) and cluster.are_even(), "a new cluster")
        _Starved(case, cluster).run()


class _Starved:
    """One case."""

    def __init__(self, case: Case, cluster: EmbeddedMembers) -> None:
        self.case, self.cluster = case, cluster
        draw = case.draw
        self.names = list(NAMES) if draw.random() < 0.5 else [draw.choice(NAMES)]
        self.dies = draw.choice("bc") if draw.random() < 0.3 else ""
        case.note(f"{'+'.join(self.names)} starved" + f", {self.dies} dies" * bool(self.dies))

    def run(self) -> None:
        cluster, case = self.cluster, self.case
        before = epochs(cluster)
        addresses = ",".join(node.address for node in cluster.nodes.values())
        writer = Writer(f"dcpd://{addresses}")
        writer.start()
        try:
            for name in self.names:
                cluster.starve_process(cluster.nodes[name].pid)
            time.sleep(case.seconds(4.0, 20.0))
            if self.dies:
                cluster.thaw_process(cluster.nodes[self.dies].pid)
                cluster.nodes[self.dies].kill()
                time.sleep(case.seconds(4.0, 10.0))
        finally:
            cluster.thaw_all()
            writer.end()
        if self.dies:
            cluster.nodes[self.dies].start()
        wait(lambda: cluster.are_in_sync(COPIES), "after nodes were starved")
        if not self.dies:
            elected = sum(epoch != before[vb_id] for vb_id, epoch in epochs(cluster).items())
            case.demand(
                not elected, Fault.WRONG, f"{elected} partitions were elected, and nobody has died"
            )
        check_documents(case, cluster, writer)


def check_documents(case: Case, cluster: EmbeddedMembers, writer: Writer) -> None:
    """Require what was answered, but for keys of which a later write has no known outcome. No node
    may have logged a traceback.
    """
    case.note(f"{len(writer.answered)} documents, {len(writer.unknown)} unknown")
    case.demand(writer.answered, Fault.BROKEN, "nothing was answered")
    with SyncKv(parse_address(cluster.nodes["a"].address), timeout_s=WRITE_S) as kv:
        for key, value in writer.answered.items():
            found = kv.get(key).value
            if found != value and key not in writer.unknown:
                text = f"{key!r} is {found[:40]!r}, and {value!r} was answered"
                case.find(Fault.WRONG, text)
    for name, node in cluster.nodes.items():
        if trouble := traceback_in(node.log_path.read_text(errors="replace")):
            case.find(Fault.BROKEN, f"node {name} logged a traceback: {trouble}")


def epochs(cluster: EmbeddedMembers) -> dict[int, int]:
    """Return the leader epoch of each partition."""
    return {row["vb"]: row["epoch"] for row in cluster.partition_map("a")}


def wait(is_so: object, when: str) -> None:
    """Return once something is so. Raises AttackError."""
    assert callable(is_so)
    give_up_at_s = time.monotonic() + BACK_S
    while True:
        try:
            if is_so():
                return
        except (OSError, ServerRefusedError, KeyError):
            pass  # it starts, or is too busy to answer
        if time.monotonic() > give_up_at_s:
            raise AttackError(Fault.BROKEN, f"{when}: not all in sync within {BACK_S:g} s")
        time.sleep(LOOK_S)
