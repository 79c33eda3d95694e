"""Look-ups into large arrays: how long they take, and how long another client's GETs take meanwhile.

    python -m benchmarks.subdoc_large --mib 20

A server with the settings of production, one client that asks for 16 elements of an array again and
again, one at a time, and one that sends GETs of a small document. The output is one JSON document:
milliseconds of the look-ups, percentiles of the GETs (in milliseconds), and the memory that the
server took for the look-ups beyond the document itself, in MiB.

Without another load on the machine, 16 look-ups into 20 MiB take less than 250 ms, and the 99th
percentile of the GETs is below 20 ms.
"""

from __future__ import annotations

import argparse
import json
import statistics
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from benchmarks.kv_client import Connection
