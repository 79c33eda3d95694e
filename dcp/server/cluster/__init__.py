"""A node of a cluster: its replication, its links to other nodes, its place in the cluster.

A node alone imports nothing of this package.
"""
