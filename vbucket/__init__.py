"""One partition (vBucket) after another: identifiers, log, memtable, store, engine."""
