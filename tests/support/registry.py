"""Whether pip can fetch packages here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def no_registry(folder: Path) -> str:
    """Why pip can fetch nothing here, "" if it can. It asks for what every build needs."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), "hatchling"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if asked.returncode == 0 else f"pip fetches no packages: {asked.stderr.strip()[:200]}"
