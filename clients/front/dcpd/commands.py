"""What the commands `dcpd` and `dcpctl` run."""

from __future__ import annotations


def dcpd() -> None:
    """Run the server."""
    from dcp.server.main import main

    main()


def dcpctl() -> None:
    """Run the command line."""
    from clients.cli.dcpctl import main

    main()
