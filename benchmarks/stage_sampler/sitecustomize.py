"""Samples the main thread of a node: Python imports this by its name, from PYTHONPATH.

Each sample is the stack of that thread, whether it runs or waits. Once a second the counts go into
the folder STAGES_FOLDER: function -> samples in which it stood anywhere in the stack.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path

EVERY_S = 0.0007
SHOWN_S = 1.0


def _sample(folder: Path, thread_id: int) -> None:
    counts = Counter[str]()
    shown_s = time.monotonic()
    while True:
        time.sleep(EVERY_S)
        frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - there is no other way
        names = set()
        while frame is not None:
            names.add(f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}")
            frame = frame.f_back
        counts.update(names)
        counts["samples"] += 1
        if time.monotonic() - shown_s >= SHOWN_S:
            shown_s = time.monotonic()
            text = json.dumps({"at_s": shown_s, "counts": counts})
            file = folder / f"{os.getpid()}.json"
            file.with_suffix(".new").write_text(text)
            file.with_suffix(".new").replace(file)


if "STAGES_FOLDER" in os.environ and "dcp.server.main" in sys.orig_argv:
    threading.Thread(
        target=_sample,
        args=(Path(os.environ["STAGES_FOLDER"]), threading.main_thread().ident),
        daemon=True,
    ).start()
