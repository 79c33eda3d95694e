"""The help of every dcpctl command, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

import click

from clients.cli.dcpctl import cli

WIDTH = 96
"""Columns of the help texts."""


def commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield each command's words and help text, groups before what is in them."""
    context = click.Context(
        command, info_name=" ".join(words), max_content_width=WIDTH, terminal_width=WIDTH
    )
    yield " ".join(words), command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from commands(inner, (*words, name))


def markdown() -> str:
    """Return a section for each command."""
    parts = []
    for name, text in commands(cli, ("dcpctl",)):
        parts += [f"## {name}", "", "```text", text, "```", ""]
    return "\n".join(parts)
