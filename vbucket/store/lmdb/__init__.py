"""The database in LMDB, its file, and the checksums of its pages."""
