"""python -m tests.sim: see sim.command."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sim.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
