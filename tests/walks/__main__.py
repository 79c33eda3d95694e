"""python -m tests.walks [--way]: which files one request passes, and how often it moves.

A reader follows a request from file to file. So the length of that way is what the structure costs,
more than lines are. Each flow runs once in this process under a profiler. Printed are

    files     files of the product that are entered
    moves     calls that enter another file than the call before
    returns   moves to a file that was visited already

`--way` prints the way itself. `tests/test_walks.py` holds the ceilings.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from walks.flows import all_walks


def main() -> None:
    """Print the walks."""
    print(f"{'flow':40} {'files':>5} {'folders':>7} {'moves':>5} {'returns':>7}")
    for walk in all_walks():
        print(f"{walk.flow:40} {walk.files:5} {walk.folders:7} {walk.moves:5} {walk.returns:7}")
        if "--way" in sys.argv:
            for name, functions in walk.way:
                print("   ", name, " > ".join(functions)[:150])


if __name__ == "__main__":
    main()
