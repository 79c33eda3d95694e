"""Small files of a data folder, which are kept twice: `dcp.server.files.kept_twice`."""

from typing import Final

TWIN_SUFFIX: Final = ".twin"
"""Of the second copy of a file."""
