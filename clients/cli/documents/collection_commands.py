"""dcpctl collection list, add, remove: scopes and collections over the admin API."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlencode

import click

from clients.cli.admin_api import admin_of, quoted
from clients.cli.dcpctl import Target, Verbs, help_text, with_target
from clients.cli.output import write_json, write_raw

SCOPES_PATH: Final = "/pools/default/buckets/default/scopes"


@click.group(
    cls=Verbs,
    help=help_text(
        "Manage scopes and collections.",
        "dcpctl collection add shop.orders",
        "dcpctl collection list",
        "dcpctl collection remove shop.orders",
        "dcpctl collection remove shop",
    ),
)
def collection() -> None:
    """Manage scopes and collections."""


@collection.command("list", help=help_text("List all.", "dcpctl collection list -o json"))
@with_target
def list_(*, target: Target) -> None:
    """List scopes and collections."""
    manifest = admin_of(target).request("GET", SCOPES_PATH)
    rows = [
        (f"{scope['name']}.{entry['name']}", f"0x{int(entry['uid'], 16):x}")
        for scope in manifest["scopes"]
        for entry in scope["collections"]
    ]
    target.show_rows([("collection", "collection"), ("id", "id")], rows)


@collection.command(
    "add",
    help=help_text(
        "Add a collection, and its scope if it is missing. SCOPE alone adds a scope.",
        "dcpctl collection add shop.orders",
        "dcpctl collection add shop.carts --max-ttl 86400",
    ),
)
@click.argument("path", metavar="SCOPE[.COLLECTION]")
@click.option(
    "--max-ttl",
    type=click.IntRange(0),
    default=0,
    help="Maximum time to live in seconds; 0: no limit.",
)
@with_target
def add(*, target: Target, path: str, max_ttl: int) -> None:
    """Add a scope or a collection."""
    scope, _, name = path.partition(".")
    admin = admin_of(target)
    scopes = {entry["name"] for entry in admin.request("GET", SCOPES_PATH)["scopes"]}
    if scope not in scopes or not name:
        admin.request("POST", SCOPES_PATH, form=urlencode({"name": scope}))
    if name:
        form = urlencode({"name": name, "maxTTL": max_ttl})
        admin.request("POST", f"{SCOPES_PATH}/{quoted(scope)}/collections", form=form)
    _done(target, "added", path)


@collection.command(
    "remove",
    help=help_text(
        "Remove a collection, or a scope with all its collections. Their documents can no longer be"
        " read, and streams no longer send them.",
        "dcpctl collection remove shop.orders",
    ),
)
@click.argument("path", metavar="SCOPE[.COLLECTION]")
@with_target
def remove(*, target: Target, path: str) -> None:
    """Remove a scope or a collection."""
    scope, _, name = path.partition(".")
    place = f"{SCOPES_PATH}/{quoted(scope)}"
    admin_of(target).request("DELETE", f"{place}/collections/{quoted(name)}" if name else place)
    _done(target, "removed", path)


def _done(target: Target, result: str, path: str) -> None:
    mode = target.output_or("plain")
    if mode == "json":
        write_json({"result": result, "collection": path})
    elif mode != "raw":
        write_raw(f"{result} {path}\n".encode())
