"""Takes Mermaid, which draws the site's diagrams, out of its npm package.

Usage: python scripts/mermaid_package.py FOLDER
Writes FOLDER/mermaid/mermaid.min.js and its licence, unless they are there. npm fetches the
package; its checksum is pinned here. To take a newer version, change VERSION and INTEGRITY:
`npm view mermaid@VERSION dist.integrity` prints the latter. Without npm the site is built all the
same, and shows the source of each diagram; one line says so.
"""

import base64
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "11.17.2"
INTEGRITY = (
    "V6K3C8EBdEsPFZXSKMJe6ppQOENxuHARr9GvHX4hh47lAbhMRD9qf4oEK7LoaRQxULMa80/qt5gHO73aCleBBg=="
)
"""SHA-512 of the package, in base64."""
FILES = {"package/dist/mermaid.min.js": "mermaid.min.js", "package/LICENSE": "LICENSE"}
FETCH_S = 120


class NotTakenError(Exception):
    """The package cannot be had here; the text says why."""


def fetch(folder: Path) -> Path:
    """Let npm fetch the package into a folder; return its path. Raises NotTakenError."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotTakenError("the command npm is missing (Node.js 20 or newer has it)")
    command = [npm, "pack", f"mermaid@{VERSION}", "--silent", "--pack-destination", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=FETCH_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise NotTakenError(f"npm could not fetch mermaid {VERSION}: {error}") from None
    package = folder / f"mermaid-{VERSION}.tgz"
    found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        raise NotTakenError(f"the package mermaid {VERSION} has the checksum {found}")
    return package


def take(folder: Path) -> None:
    """Put the files into a folder, once for each version. Raises NotTakenError."""
    target = folder / "mermaid"
    stamp = folder / f".{VERSION}"
    if stamp.exists():
        return
    with tempfile.TemporaryDirectory() as fetched, tarfile.open(fetch(Path(fetched))) as package:
        target.mkdir(parents=True, exist_ok=True)
        for name, taken in FILES.items():
            file = package.extractfile(name)
            assert file is not None, name
            (target / taken).write_bytes(file.read())
    stamp.touch()


if __name__ == "__main__":
    try:
        take(Path(sys.argv[1]))
    except NotTakenError as error:
        print(f"the site shows diagrams as text: {error}")
