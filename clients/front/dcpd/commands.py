"""What the commands `dcpd` and `dcpctl` run."""

from __future__ import annotations


def dcpd() -> None:
    """Run the server."""
    from dcp.server.main import main

    main()


def dcpctl() -> None:
    """Run the command line."""
    import gc

    # Imports leave no garbage. To look for it again and again is a fifth of a short command's time.
    gc.set_threshold(50_000)
    from clients.cli.dcpctl import main

    main()
