"""Standard input as bytes, which several parts of one command may read in turn.

For example, `--password-file -` reads one line, and `set KEY -` reads the value after it. As text,
the first reader would take more than its line: a text stream reads ahead.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

import click


def standard_input() -> BinaryIO:
    """Return standard input. Raises click.UsageError if it is closed."""
    if sys.stdin is None:
        raise click.UsageError("standard input is closed: name a file, or pipe the input in")
    return sys.stdin.buffer


def input_is_terminal() -> bool:
    """Whether a person types at standard input; False if it is closed."""
    return sys.stdin is not None and sys.stdin.isatty()
