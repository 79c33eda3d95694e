"""The log, the database and the metadata store in memory: deterministic, with faults on demand."""
