"""What the commands `dcpd` and `dcpctl` run."""

from __future__ import annotations


def dcpd() -> None:
    """Run the server."""
    from dcp.server.main import main

    main()


def dcpctl() -> None:
    """Run the command line. A short command is little else than the start and end of Python."""
    import gc
    import os
    import sys

    # Imports leave no garbage, and to look for it again and again takes 10 ms.
    gc.set_threshold(50_000)
    from clients.cli.dcpctl import run

    code = run()
    import threading

    if threading.active_count() > 1:
        sys.exit(code)
    # Nobody needs the modules to be taken apart, which takes 7 ms.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
