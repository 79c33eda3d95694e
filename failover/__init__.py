"""Failover: its rules, replication between nodes, the coordinator, and the metadata store.

It stands below the server's process and above sessions, streams and partitions; `failover.rules`
stands below all.
"""
