"""`python -m clients.cli` is dcpctl."""

from clients.cli.main import main

main()
