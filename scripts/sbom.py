"""Writes what the server needs, as CycloneDX: every locked package with its version and hashes.

Usage: python scripts/sbom.py FILE

cyclonedx-py reads requirements/run.txt. It cannot know the project's version, which is a constant
in the sources, nor that the project needs all of these packages; both are added here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from dcp import __version__

ROOT = Path(__file__).resolve().parent.parent
ROOT_REF = "root-component"


def sbom() -> str:
    """Return the document. Raises ValueError if it is not valid."""
    made = subprocess.run(
        [
            sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements",
            "requirements/run.txt", "--pyproject", "pyproject.toml", "--mc-type", "application",
            "--spec-version", "1.6", "--output-reproducible", "--no-validate",
            "--output-file", "-",
        ],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    document = json.loads(made.stdout)
    document["metadata"]["component"] |= {"version": __version__, "bom-ref": ROOT_REF}
    needed = [component["bom-ref"] for component in document["components"]]
    others = [item for item in document.get("dependencies", []) if item["ref"] != ROOT_REF]
    document["dependencies"] = [*others, {"ref": ROOT_REF, "dependsOn": needed}]
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise ValueError(f"the document is not valid CycloneDX: {problem}")
    return text


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(sbom())
