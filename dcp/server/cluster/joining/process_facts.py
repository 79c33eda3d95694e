"""What this process tells the other members about itself, and whether it fits to them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from dcp.server.cluster.node_map import host_and_port
from dcp.server.storage.folder import LOCK_NAME
from failover.coordinator.membership import ProcessFacts
from failover.coordinator.records import (
    AliveRecord,
    ClusterKeys,
    KeyKind,
    MemberRecord,
    RecordUnreadableError,
    decode_record,
)
from failover.metadata.metastore import KeyValue, Range, Txn, TxnResult
from failover.replication.messages import FORMAT as PROTOCOL
from failover.replication.messages import FORMAT_OLDEST as PROTOCOL_OLDEST
from failover.replication.messages import common_format

VERSION_ADVICE: Final = (
    "Versions of dcpd that follow each other run side by side. For others stop all of the nodes, "
    "then start all with the same one"
)
_ADDRESS_ADVICE: Final = (
    "Start this node with other ports (--port, --admin-port) or with its own host "
    "(--advertise-host). If that node has just died, try again in a few seconds"
)
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def place_of(data_dir: Path) -> str:
    """Return a name for the lock of a data folder: no other folder of any machine has it, and it
    changes with a reboot. "" if there is none: then nobody is taken for the same folder.
    """
    try:
        found = (data_dir / LOCK_NAME).stat()
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return f"{boot}/{found.st_dev}/{found.st_ino}"


def facts_of(data_dir: Path, own: MemberRecord) -> ProcessFacts:
    """Return what the process tells; `own` is its record, with the ports that it listens on."""
    return ProcessFacts(place_of(data_dir), own.name, PROTOCOL, PROTOCOL_OLDEST, addresses_of(own))


def addresses_of(own: MemberRecord) -> tuple[str, ...]:
    """Return HOST:PORT of each port that is known, the key-value port first. No two nodes may have
    one of them in common, because clients tell nodes apart by host and port.
    """
    host, port = host_and_port(own.address)
    shown = f"[{host}]" if ":" in host else host
    ports = (port, own.admin_port, own.kv_tls_port, own.admin_tls_port)
    return tuple(dict.fromkeys(f"{shown}:{each}" for each in ports if each))


def fit_reads(keys: ClusterKeys, own: MemberRecord) -> Txn:
    """Return the request whose result `unfit` judges."""
    addresses = [Range(keys.of_address(address)) for address in addresses_of(own)]
    return Txn((), (Range(keys.of_members(KeyKind.ALIVE), is_prefix=True), *addresses))


def unfit(result: TxnResult, own: MemberRecord) -> tuple[str, str]:
    """Return why a newcomer does not fit to the nodes that run, and what to try; "": it does."""
    alive, *holders = result.ranges
    if why := unfit_by(alive.items, own.member):
        return why, VERSION_ADVICE
    for address, read in zip(addresses_of(own), holders, strict=True):
        for item in read.items:
            if (holder := decode_record(item, AliveRecord)).member != own.member:
                return (
                    f"node {holder.name or holder.member} of this cluster has the address "
                    f"{address}"
                ), _ADDRESS_ADVICE  # fmt: skip
    return "", ""


def unfit_by(alive: Iterable[KeyValue], member: str) -> str:
    """Return why this version of dcpd cannot run beside the processes that run; "": it can."""
    for item in alive:
        try:
            other = decode_record(item, AliveRecord)
        except RecordUnreadableError as error:
            return f"a node that runs has another version of dcpd: {error}"
        is_common = common_format(other.protocol, other.oldest_protocol)
        if other.member != member and not is_common:
            return (
                f"node {other.name or other.member} speaks version {other.protocol} of the "
                f"replication protocol, and this dcpd speaks version {PROTOCOL}"
            )
    return ""
