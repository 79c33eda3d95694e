"""The client of etcd, and the thread that renews a lease."""
