"""Partitions and their storage: seqnos, versions, branches, compaction, damage, faults."""
