"""`python -m clients.cli` is dcpctl."""

from clients.cli.dcpctl import main

main()
