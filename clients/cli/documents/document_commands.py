"""dcpctl get, set, del, exists, incr, touch. These commands must start fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import click

from clients.cli.dcpctl import (
    EXIT_NOT_FOUND,
    Target,
    complain,
    help_text,
    suggestion,
    with_target,
)
from clients.cli.documents.expiry import expiry_text, with_expiry
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
from clients.errors import NotFoundError, UnknownCollectionError
from clients.kv.sync_client import SyncKv
from clients.operation import DURABILITY_NAMES, DurabilityChoice, MutationResult, key_bytes
from dcp.wire.opcode import Opcode


def raw_key_of(text: str) -> bytes:
    """Return a key from the command line; it need not be valid UTF-8."""
    try:
        return key_bytes(text.encode(errors="surrogateescape"))
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _decoded(xattrs: dict[str, bytes]) -> dict[str, object]:
    import json

    return {name: json.loads(text) for name, text in xattrs.items()}


COLLECTION = click.option(
    "--collection", metavar="SCOPE.COLLECTION", help="In this collection, not the default one."
)


_DURABILITY = click.option(
    "--durability", type=click.Choice(DURABILITY_NAMES), default="none", show_default=True,
    help="Which copies have the change before the answer. --timeout bounds the wait.",
)  # fmt: skip


@contextmanager
def connected(target: Target, collection: str | None) -> Iterator[SyncKv]:
    """Yield a client. If a document or the collection is not there, a person is told which keys or
    collections are like it.
    """
    with SyncKv(target.address, timeout_s=target.timeout_s, collection=collection) as kv:
        try:
            yield kv
        except NotFoundError as error:
            _suggest_keys(target, error, collection)
            raise
        except UnknownCollectionError as error:
            if collection is not None and is_read_by_a_person():
                names = collections_in(kv.collections_manifest())
                error.hint = suggestion(collection, names, "dcpctl collection list shows all.")
            raise


def collections_in(manifest: bytes) -> list[str]:
    """Return the names in the answer to GET_COLLECTIONS_MANIFEST: scope.collection."""
    import json

    return [
        f"{scope['name']}.{each['name']}"
        for scope in json.loads(manifest)["scopes"]
        for each in scope["collections"]
    ]


def is_read_by_a_person() -> bool:
    """Whether errors go to a terminal."""
    return sys.stderr.isatty()


def _suggest_keys(target: Target, error: NotFoundError, collection: str | None) -> None:
    """Put keys that are like the missing one into the hint. Programs do not wait for that."""
    if error.key is not None and is_read_by_a_person():
        from clients.cli.documents.keys_command import near_keys

        if near := near_keys(target, error.key, collection):
            error.hint = f"Did you mean {' or '.join(map(shown, near))}? dcpctl keys lists all."


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
@COLLECTION
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
    with connected(target, collection) as kv:
        if xattrs:
            document, found = kv.get_with_xattrs(raw_key_of(key))
        else:
            document = kv.get(raw_key_of(key), from_replica=from_replica)
    if mode == "json":
        write_json(
            {
                **text_fields("key", raw_key_of(key)),
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


_NO_VALUE: Final = "VALUE is missing. Write it after the key ('' is an empty one), or pipe it in"


@click.command(
    "set",
    help=help_text(
        "Store a document. VALUE - reads it from standard input; without VALUE that is done, too,"
        " if something comes there.",
        'dcpctl set user:1 \'{"name":"Ada"}\'',
        "dcpctl set photo - < photo.jpg",
        "dcpctl set user:1 v2 --cas 1795262141941612544",
        "dcpctl set lock me --add",
        "dcpctl set session:7 me --ttl 30m",
        "dcpctl set offer:1 '{}' --expiry 2027-01-31",
        "dcpctl set 1001 '{}' --collection shop.orders",
        "dcpctl set user:1 v3 --durability majority --timeout 2s",
    ),
)
@click.argument("key")
@click.argument("value", required=False)
@COLLECTION
@click.option(
    "--flags", type=click.IntRange(0, 2**32 - 1), default=0, help="32 bits for your own use."
)
@with_expiry
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
    expiry: int | None,
    cas: int,
    rule: str | None,
    durability: DurabilityChoice,
) -> None:
    """Store a document. VALUE - (or no VALUE, when piped) reads it from standard input."""
    raw_key = raw_key_of(key)
    if rule == "add" and cas:
        raise click.UsageError(
            "--add cannot be used with --cas: it creates a document, which has no CAS yet"
        )
    if value is None and input_is_terminal():
        raise click.UsageError(_NO_VALUE)
    if value is None or value == "-":
        _ = target.address  # With --password-file -, the password is the line before the value.
        raw_value = standard_input().read()
        if value is None and not raw_value:
            # Nobody piped: /dev/null in cron, in CI and in containers is empty, too.
            raise click.UsageError(_NO_VALUE)
    else:
        raw_value = value.encode(errors="surrogateescape")
    opcode = {"add": Opcode.ADD, "replace": Opcode.REPLACE}.get(rule or "", Opcode.SET)
    with connected(target, collection) as kv:
        result = kv.store(
            opcode, raw_key, raw_value, flags=flags, expiry_s=expiry or 0, cas=cas,
            durability=durability,
        )  # fmt: skip
    show_mutation(target, "stored", raw_key, result)


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
@COLLECTION
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
    with connected(target, collection) as kv:
        for key in keys:
            raw_key = raw_key_of(key)
            try:
                result = kv.delete(raw_key, cas=cas, durability=durability)
            except NotFoundError as error:
                _suggest_keys(target, error, collection)
                complain(error, is_json=target.output == "json")
                exit_code = EXIT_NOT_FOUND
            else:
                show_mutation(target, "deleted", raw_key, result)
    return exit_code


@click.command(
    "exists",
    help=help_text(
        "Ask whether documents are there, without reading them. The exit code is 0 if all are, 3 if"
        " one is missing.",
        "dcpctl exists user:1",
        "dcpctl exists user:1 user:2 -o json",
        "dcpctl exists lock -o raw || dcpctl set lock me --add",
    ),
)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@COLLECTION
@with_target
def exists(*, target: Target, keys: tuple[str, ...], collection: str | None) -> int:
    """Ask whether documents are there."""
    columns = [("key", "key"), ("exists", "exists"), ("bytes", "bytes"), ("expires", "expires")]
    rows: list[tuple[object, ...]] = []
    with SyncKv(target.address, timeout_s=target.timeout_s, collection=collection) as kv:
        for key in keys:
            try:
                facts = kv.metadata(raw_key_of(key))
            except NotFoundError:
                rows.append((shown(raw_key_of(key)), False, None, None))
            else:
                expires = facts["exptime"] or None
                rows.append((shown(raw_key_of(key)), True, facts["value_bytes"], expires))
    if target.rows_mode == "json":
        target.show_rows(columns, rows)
    elif target.rows_mode != "raw":
        words = [
            (key, "yes" if is_there else "no", "" if size is None else size, expiry_text(expires))
            for key, is_there, size, expires in rows
        ]
        target.show_rows(columns, words)
    return 0 if all(row[1] for row in rows) else EXIT_NOT_FOUND


@click.command(
    "incr",
    # -5 is a number here, not an option.
    context_settings={"ignore_unknown_options": True},
    help=help_text(
        "Add to a counter, a document of decimal digits, and print it. A negative N subtracts; a"
        " counter stops at 0. A missing one counts as 0.",
        "dcpctl incr hits",
        "dcpctl incr stock:7 -3",
        "dcpctl incr tickets --initial 1000 --ttl 1d",
        "dcpctl incr hits --only-existing",
    ),
)
@click.argument("key")
@click.argument("number", metavar="[N]", type=click.IntRange(1 - 2**64, 2**64 - 1), default=1)
@COLLECTION
@click.option(
    "--initial", type=click.IntRange(0, 2**64 - 1), metavar="N",
    help="What a missing counter becomes instead.",
)  # fmt: skip
@click.option("--only-existing", is_flag=True, help="Fail if it is missing.")
@with_expiry
@_DURABILITY
@with_target
def incr(
    *,
    target: Target,
    key: str,
    number: int,
    collection: str | None,
    initial: int | None,
    only_existing: bool,
    expiry: int | None,
    durability: DurabilityChoice,
) -> None:
    """Add to a counter."""
    if only_existing and (initial is not None or expiry is not None):
        raise click.UsageError("--initial, --ttl and --expiry are for a counter that is missing")
    if initial is None and not only_existing:
        initial = max(0, number)
    with connected(target, collection) as kv:
        result = kv.increment(
            raw_key_of(key), number, initial=initial, expiry_s=expiry or 0, durability=durability
        )
    if target.output_or("plain") == "json":
        place = {"vb": result.vb_id, "seqno": result.seqno, "cas": str(result.cas)}
        # Decimal text, as many JSON readers round numbers above 2^53.
        write_json({**text_fields("key", raw_key_of(key)), "value": str(result.number), **place})
    else:
        write_raw(f"{result.number}\n".encode())


@click.command(
    "touch",
    help=help_text(
        "Change when documents expire, and nothing else of them.",
        "dcpctl touch session:7 --ttl 30m",
        "dcpctl touch session:7 session:8 --expiry 2027-01-31T12:00Z",
        "dcpctl touch session:7 --expiry never",
    ),
)
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@COLLECTION
@with_expiry
@with_target
def touch(
    *, target: Target, keys: tuple[str, ...], collection: str | None, expiry: int | None
) -> int:
    """Change when documents expire."""
    if expiry is None:
        raise click.UsageError("say when: --ttl 5m, --expiry 2027-01-31, or --expiry never")
    exit_code = 0
    with connected(target, collection) as kv:
        for key in map(raw_key_of, keys):
            try:
                cas = kv.touch(key, expiry)
            except NotFoundError as error:
                _suggest_keys(target, error, collection)
                complain(error, is_json=target.output == "json")
                exit_code = EXIT_NOT_FOUND
                continue
            if target.output_or("plain") == "json":
                write_json({"result": "touched", **text_fields("key", key), "cas": str(cas)})
            elif target.output != "raw":
                write_raw(f"touched {shown(key)} (cas {cas})\n".encode())
    return exit_code


def show_mutation(target: Target, done: str, key: bytes, result: MutationResult) -> None:
    """Print what was done to a document, and where the change is."""
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
        where = f"partition {result.vb_id}, seqno {result.seqno}, cas {result.cas}"
        write_raw(f"{done} {shown(key)} ({where})\n".encode())
