"""dcpctl get, set, del. These commands must start fast."""

from __future__ import annotations

import click

from clients.cli.dcpctl import EXIT_NOT_FOUND, Target, complain, help_text, with_target
from clients.cli.output import (
    VALUE_STYLES,
    ValueStyle,
    is_terminal,
    shown,
    text_fields,
    value_fields,
    write_json,
    write_raw,
)
from clients.cli.standard_input import input_is_terminal, standard_input
from clients.errors import NotFoundError
from clients.kv.sync_client import SyncKv
from clients.operation import DURABILITY_NAMES, DurabilityChoice, MutationResult, key_bytes
from dcp.wire.opcode import Opcode


def _key(text: str) -> bytes:
    """Return a key from the command line; it need not be valid UTF-8."""
    try:
        return key_bytes(text.encode(errors="surrogateescape"))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _decoded(xattrs: dict[str, bytes]) -> dict[str, object]:
    import json

    return {name: json.loads(text) for name, text in xattrs.items()}


_COLLECTION = click.option(
    "--collection", metavar="SCOPE.COLLECTION", help="In this collection, not the default one."
)


_DURABILITY = click.option(
    "--durability", type=click.Choice(DURABILITY_NAMES), default="none", show_default=True,
    help="Which copies have the change before the answer. --timeout bounds the wait.",
)  # fmt: skip


def _connect(target: Target, collection: str | None) -> SyncKv:
    return SyncKv(target.address, timeout_s=target.timeout_s, collection=collection)


@click.command(
    "get",
    help=help_text(
        "Print a document: as a line on a terminal, or as its exact bytes when piped.",
        "dcpctl get user:1",
        "dcpctl get photo > photo.jpg",
        "dcpctl get user:1 -o json",
        "dcpctl get user:1 --xattrs",
        "dcpctl get 1001 --collection shop.orders",
        "dcpctl get user:1 --from-replica",
    ),
)
@click.argument("key")
@_COLLECTION
@click.option("--xattrs", is_flag=True, help="Print XATTRs, too; as JSON.")
@click.option(
    "--value", "style", type=click.Choice(VALUE_STYLES), default="json", show_default=True,
    help="The value in -o json: an object or array as JSON, as text, or as base64.",
)  # fmt: skip
@click.option(
    "--from-replica", is_flag=True,
    help="Ask the copies first, and the master if none answers. A copy may be a little behind.",
)  # fmt: skip
@with_target
def get(
    *,
    target: Target,
    key: str,
    collection: str | None,
    xattrs: bool,
    style: ValueStyle,
    from_replica: bool,
) -> None:
    """Print a document: as a line on a terminal, or as its exact bytes when piped."""
    found: dict[str, bytes] = {}
    mode = target.output_or("json" if xattrs else "plain" if is_terminal() else "raw")
    if xattrs and mode != "json":
        raise click.UsageError("--xattrs prints JSON: leave out -o, or use -o json")
    if xattrs and from_replica:
        raise click.UsageError("--xattrs asks the master: leave out --from-replica")
    with _connect(target, collection) as kv:
        if xattrs:
            document, found = kv.get_with_xattrs(_key(key))
        else:
            document = kv.get(_key(key), from_replica=from_replica)
    if mode == "json":
        write_json(
            {
                **text_fields("key", _key(key)),
                **value_fields(document.value, style),
                "cas": str(document.cas),
                "flags": document.flags,
                **({"xattrs": _decoded(found)} if xattrs else {}),
            }
        )
    elif mode == "raw":
        write_raw(document.value)
    else:
        ends = document.value.endswith(b"\n")
        write_raw(document.value if ends else document.value + b"\n")


@click.command(
    "set",
    help=help_text(
        "Store a document. VALUE - (or no VALUE, when piped) reads it from standard input.",
        'dcpctl set user:1 \'{"name":"Ada"}\'',
        "dcpctl set photo - < photo.jpg",
        "dcpctl set user:1 v2 --cas 1795262141941612544",
        "dcpctl set lock me --add",
        "dcpctl set 1001 '{}' --collection shop.orders",
        "dcpctl set user:1 v3 --durability majority --timeout 2s",
    ),
)
@click.argument("key")
@click.argument("value", required=False)
@_COLLECTION
@click.option(
    "--flags", type=click.IntRange(0, 2**32 - 1), default=0, help="32 bits for your own use."
)
@click.option(
    "--expiry", type=click.IntRange(0, 2**32 - 1), default=0, metavar="SECONDS",
    help="Time to live; more than 30 days means an absolute Unix time.",
)  # fmt: skip
@click.option(
    "--cas", type=click.IntRange(0, 2**64 - 1), default=0, help="Only if the document has this CAS."
)
@click.option("--add", "rule", flag_value="add", help="Only if it does not exist.")
@click.option("--replace", "rule", flag_value="replace", help="Only if it exists.")
@_DURABILITY
@with_target
def set_(
    *,
    target: Target,
    key: str,
    value: str | None,
    collection: str | None,
    flags: int,
    expiry: int,
    cas: int,
    rule: str | None,
    durability: DurabilityChoice,
) -> None:
    """Store a document. VALUE - (or no VALUE, when piped) reads it from standard input."""
    raw_key = _key(key)
    if rule == "add" and cas:
        raise click.UsageError(
            "--add cannot be used with --cas: it creates a document, which has no CAS yet"
        )
    if value is None and input_is_terminal():
        raise click.UsageError("VALUE is missing. Use - to read it from standard input")
    if value is None or value == "-":
        _ = target.address  # With --password-file -, the password is the line before the value.
        raw_value = standard_input().read()
    else:
        raw_value = value.encode(errors="surrogateescape")
    opcode = {"add": Opcode.ADD, "replace": Opcode.REPLACE}.get(rule or "", Opcode.SET)
    with _connect(target, collection) as kv:
        result = kv.store(
            opcode, raw_key, raw_value, flags=flags, expiry_s=expiry, cas=cas,
            durability=durability,
        )  # fmt: skip
    _show_mutation(target, "stored", raw_key, result)


@click.command(
    "del",
    help=help_text(
        "Delete documents.",
        "dcpctl del user:1",
        "dcpctl del user:1 user:2",
        "dcpctl del 1001 --collection shop.orders",
    ),
)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@_COLLECTION
@click.option(
    "--cas", type=click.IntRange(0, 2**64 - 1), default=0, help="Only if the document has this CAS."
)
@_DURABILITY
@with_target
def delete(
    *,
    target: Target,
    keys: tuple[str, ...],
    collection: str | None,
    cas: int,
    durability: DurabilityChoice,
) -> int:
    """Delete documents."""
    if cas and len(keys) > 1:
        raise click.UsageError("--cas works with one KEY only: every document has its own CAS")
    exit_code = 0
    with _connect(target, collection) as kv:
        for key in keys:
            raw_key = _key(key)
            try:
                result = kv.delete(raw_key, cas=cas, durability=durability)
            except NotFoundError as error:
                complain(error)
                exit_code = EXIT_NOT_FOUND
            else:
                _show_mutation(target, "deleted", raw_key, result)
    return exit_code


def _show_mutation(target: Target, done: str, key: bytes, result: MutationResult) -> None:
    mode = target.output_or("plain")
    if mode == "json":
        write_json(
            {
                "result": done,
                **text_fields("key", key),
                "vb": result.vb_id,
                "seqno": result.seqno,
                "cas": str(result.cas),
                "vb_uuid": str(result.vb_uuid),
            }
        )
    elif mode != "raw":
        where = f"vbucket {result.vb_id}, seqno {result.seqno}, cas {result.cas}"
        write_raw(f"{done} {shown(key)} ({where})\n".encode())
