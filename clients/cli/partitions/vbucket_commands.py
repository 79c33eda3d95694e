"""dcpctl vb branch, failover, purge, state, mend-cas, dump: operations on a partition."""

from __future__ import annotations

import json
from typing import Any, Final

import click

from clients.cli.admin_api import AdminClient, AdminRequestError, admin_of
from clients.cli.dcpctl import EXIT_OK, EXIT_PARTIAL, Target, Verbs, help_text, with_target
from clients.cli.output import write_json, write_raw
from clients.cli.partitions.vb_option import with_vb, with_vbs
from clients.kv.sync_client import SyncKv
from clients.link.topology import ClusterNode
from vbucket.model.ids import SEQNO_MAX

REFUSED_SHOWN: Final = 5
"""Refusals of one command that are printed."""
_SEQNO = click.IntRange(0, SEQNO_MAX)


@click.group(
    cls=Verbs,
    help=help_text(
        "Operate on a partition, or test how consumers react to a rollback, failover or purge.",
        "dcpctl vb branch --vb 17 --at 5",
        "dcpctl vb failover --vb 17 --lose 3",
        "dcpctl vb purge --vb 17",
        "dcpctl vb state dead --vb 17",
        "dcpctl vb dump --vb 17 --at 1000",
        "dcpctl vb mend-cas",
    ),
)
def vb() -> None:
    """Operate on a partition."""


@vb.command(
    "branch",
    help=help_text(
        "Branch a partition's history: undo the changes above the seqno, and start a new version."
        " Consumers that saw more get a ROLLBACK. A partition can go back to any seqno at or above"
        " its history floor (stat vbucket-seqno), and to 0.",
        "dcpctl vb branch --vb 17 --at 5",
        "dcpctl vb branch --vb 17 --at 5 --or-zero",
        "dcpctl vb branch --vb 0-1023 --fraction 0.1    # the newest tenth of each is undone",
    ),
)
@with_vbs
@click.option("--at", "at_seqno", type=_SEQNO, metavar="SEQNO", help="Last seqno to keep.")
@click.option(
    "--fraction", type=click.FloatRange(0, 1, min_open=True), metavar="F",
    help="Undo this part of each partition's changes, the newest.",
)  # fmt: skip
@click.option(
    "--or-zero", is_flag=True,
    help="If history does not reach back that far, undo everything and say why.",
)  # fmt: skip
@with_target
def branch(
    *, target: Target, vb_ids: tuple[int, ...], at_seqno: int | None, fraction: float | None,
    or_zero: bool,
) -> int:  # fmt: skip
    """Branch the history of partitions."""
    if not vb_ids:
        raise click.UsageError("name partitions: --vb 17, or --vb 3,17-20")
    if (at_seqno is None) == (fraction is None):
        raise click.UsageError("--at SEQNO or --fraction F says how far to go back")
    if len(vb_ids) > 1 or fraction is not None:
        if or_zero:
            raise click.UsageError("--or-zero is for one partition, with --at")
        return _branch_many(target, vb_ids, {"at": at_seqno, "fraction": fraction})
    (vb_id,) = vb_ids
    body: dict[str, Any] = {"at": at_seqno} | ({"or_zero": True} if or_zero else {})
    answer = _done(target, vb_id, "branch", body)
    if answer.get("reason") and target.output_or("plain") != "json":
        write_raw(f"back to 0: {answer['reason']}\n".encode())
    _show_version(target, answer, f"partition {vb_id} branched")
    return EXIT_OK


def _branch_many(target: Target, vb_ids: tuple[int, ...], how: dict[str, Any]) -> int:
    """Branch partitions, all nodes at the same time; return the exit code."""
    from concurrent.futures import ThreadPoolExecutor

    with SyncKv(target.address, timeout_s=target.timeout_s) as kv:
        topology = kv.topology()
    served: dict[ClusterNode, list[int]] = {}
    for vb_id in vb_ids:
        served.setdefault(topology.node_of(vb_id), []).append(vb_id)

    def ask(node: ClusterNode) -> dict[str, Any]:
        admin = AdminClient(target, node)
        answer: dict[str, Any] = admin.request(
            "POST", "/api/v1/vbuckets/branch", {"vbs": served[node], **how}
        )
        return answer

    with ThreadPoolExecutor(len(served)) as pool:
        answers = list(pool.map(ask, served))
    branched = [each for answer in answers for each in answer["branched"]]
    refused = [each for answer in answers for each in answer["refused"]]
    if target.output_or("plain") == "json":
        write_json({"branched": branched, "refused": refused})
    else:
        undone = sum(each["undone_seqnos"] for each in branched)
        write_raw(
            f"{len(branched)} partition{'' if len(branched) == 1 else 's'} branched, "
            f"{undone} change{'' if undone == 1 else 's'} undone\n".encode()
        )
    for each in refused[:REFUSED_SHOWN]:
        click.echo(f"dcpctl: partition {each['vb']}: {each['why']}", err=True)
    if len(refused) > REFUSED_SHOWN:
        click.echo(f"dcpctl: {len(refused)} partitions were refused in all", err=True)
    return EXIT_PARTIAL if refused else EXIT_OK


@vb.command(
    "failover",
    help=help_text(
        "Simulate the promotion of a replica: the partition gets a new version at its high seqno,"
        " and its streams end with reason 2 (state changed). With --lose, the replica was N changes"
        " behind, so these are undone first.",
        "dcpctl vb failover --vb 17",
        "dcpctl vb failover --vb 17 --lose 3",
    ),
)
@with_vb
@click.option("--lose", type=_SEQNO, default=0, metavar="N", help="Undo the last N changes.")
@with_target
def failover(*, target: Target, vb_id: int, lose: int) -> None:
    """Simulate the promotion of a replica."""
    answer = _done(target, vb_id, "failover", {"lose": lose})
    _show_version(target, answer, f"partition {vb_id} failed over")


@vb.command(
    "purge",
    help=help_text(
        "Purge the deletions up to a seqno. Consumers below it are rolled back to 0, because they"
        " may have missed a deletion. The partition can no longer go back below it, except to 0."
        " The next compaction drops the deletions. The change at the high seqno is never purged.",
        "dcpctl vb purge --vb 17",
        "dcpctl vb purge --vb 17 --upto 5",
    ),
)
@with_vb
@click.option("--upto", type=_SEQNO, metavar="SEQNO", help="Default: as far as possible.")
@with_target
def purge(*, target: Target, vb_id: int, upto: int | None) -> None:
    """Purge deletions."""
    answer = _done(target, vb_id, "purge", {} if upto is None else {"upto": upto})
    _show(target, answer, f"partition {vb_id} purged up to seqno {answer['purge_seqno']}")


@vb.command(
    "state",
    help=help_text(
        "Set the state of a partition. If it is not active, it answers NOT_MY_VBUCKET. If it is"
        " neither active nor replica, its streams end with reason 2 (state changed). Becoming"
        " active starts a new version.",
        "dcpctl vb state dead --vb 17",
        "dcpctl vb state active --vb 17",
    ),
)
@with_vb
@click.argument("state", type=click.Choice(["active", "replica", "pending", "dead"]))
@with_target
def set_state(*, target: Target, vb_id: int, state: str) -> None:
    """Set the state of a partition."""
    answer = _done(target, vb_id, "state", {"state": state}, at_first_node=True)
    _show(target, answer, f"partition {vb_id} is {state} (it was {answer['before']})")


@vb.command(
    "mend-cas",
    help=help_text(
        "Reset the CAS of partitions to the clock if it is further ahead than the setting"
        " cas_drift_max. (Older servers accepted any CAS with SET_WITH_META and continued from it.)"
        " Affected documents get a new version with the same content, which consumers see as a"
        " change. Clients that hold an old CAS must read again. Without --vb: all affected"
        " partitions (`dcpctl status -o json` counts them as cas_ahead).",
        "dcpctl vb mend-cas",
        "dcpctl vb mend-cas --vb 17,528",
    ),
)
@with_vbs
@with_target
def mend_cas(*, target: Target, vb_ids: tuple[int, ...]) -> None:
    """Reset the CAS of partitions to the clock."""
    chosen = vb_ids or admin_of(target).request("GET", "/api/v1/status")["cas_ahead"]
    for vb_id in chosen:
        answer = _done(target, vb_id, "mend-cas", {})
        changed = f"{answer['documents']} documents and {answer['deletions']} deletions"
        _show(target, answer, f"partition {vb_id}: {changed} have a new CAS")
    if not chosen and target.output_or("plain") != "json":
        write_raw(b"no partition's CAS is too far ahead\n")


def _done(
    target: Target, vb_id: int, action: str, body: dict[str, Any], *, at_first_node: bool = False
) -> dict[str, Any]:
    admin = admin_of(target, vb_id=None if at_first_node else vb_id)
    answer: dict[str, Any] = admin.request("POST", f"/api/v1/vbuckets/{vb_id}/{action}", body)
    return answer


def _show_version(target: Target, answer: dict[str, Any], done: str) -> None:
    undone = answer["undone_seqnos"]
    changes = "1 change" if undone == 1 else f"{undone:,} changes"
    version = f"{changes} undone; new version {answer['vb_uuid']}"
    _show(target, answer, f"{done} at seqno {answer['seqno']}, {version}")


def _show(target: Target, answer: dict[str, Any], line: str) -> None:
    if target.output_or("plain") == "json":
        write_json(answer)
    else:
        write_raw(f"{line}\n".encode())


@vb.command(
    "dump",
    help=help_text(
        "Print the documents of a partition as of a seqno: one JSON object per line, in key order."
        " Later changes do not appear in the output. The default is the committed state. --at"
        " selects an earlier state, as far back as the partition's history reaches. The seqno and"
        " version go to stderr.",
        "dcpctl vb dump --vb 17",
        "dcpctl vb dump --vb 17 --at 1000 > before.ndjson",
    ),
)
@with_vb
@click.option(
    "--at", "at_seqno", type=click.IntRange(0, SEQNO_MAX), metavar="SEQNO",
    help="Print the state as of this seqno.",
)  # fmt: skip
@with_target
def dump(*, target: Target, vb_id: int, at_seqno: int | None) -> None:
    """Print the documents of a partition as of a seqno."""
    path = f"/api/v1/vbuckets/{vb_id}/documents"
    admin = admin_of(target, vb_id=vb_id)
    with admin.lines(path if at_seqno is None else f"{path}?at={at_seqno}") as answer:
        seqno, vb_uuid = answer.headers["dcpd-seqno"], answer.headers["dcpd-vb-uuid"]
        click.echo(f"partition {vb_id} as of seqno {seqno}, version {vb_uuid}", err=True)
        for line in answer:
            if line.startswith(b'{"error"'):
                raise _incomplete(line)
            write_raw(line)


def _incomplete(line: bytes) -> AdminRequestError:
    error = json.loads(line)["error"]
    refusal = AdminRequestError(f"{error['what']}: {error['why']}", hint=error["try"])
    refusal.exit_code = EXIT_PARTIAL
    return refusal
