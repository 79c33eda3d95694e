"""The store: blocks of versions and an index of keys, in LMDB (or in memory, for tests)."""
