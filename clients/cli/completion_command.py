"""dcpctl completion: the script with which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from clients.cli.dcpctl import cli, help_text


@click.command(
    "completion",
    help=help_text(
        "Print a script that lets a shell complete the commands and options of dcpctl or dcpd.",
        "source <(dcpctl completion bash)            # now; or as a line of ~/.bashrc",
        'dcpctl completion zsh > "${fpath[1]}/_dcpctl"',
        "dcpctl completion fish > ~/.config/fish/completions/dcpctl.fish",
        "dcpctl completion bash --program dcpd",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option(
    "--program", type=click.Choice(["dcpctl", "dcpd"]), default="dcpctl", show_default=True,
    help="What to complete.",
)  # fmt: skip
def completion(shell: str, program: str) -> None:
    """Print a completion script."""
    found = get_completion_class(shell)
    assert found is not None, "click has these shells"
    # Only the names matter: the script calls the program itself for the words.
    script = found(cli, {}, program, f"_{program.upper()}_COMPLETE")
    click.echo(script.source_template % script.source_vars())
