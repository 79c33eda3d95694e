"""Replication between nodes: masters, replicas, and the links between them. Sans-IO. Stands on the
coordinator's view of the records, on sessions and the partition engine; the server runs it.

    node        a node's partitions and their roles: tells master and replica what happens
    master      what it does as a master: masterships, feeds, changes of records
    mastership  one partition of a master, in one leader epoch
    serving     which partitions a master serves, and why one is fenced
    handover    gives partitions to wanted masters
    commit      how groups go to replicas, and are committed; `group` is what goes
    feed        the master's end of a link; `progress` is what it knows of a replica's copy
    replica     what it does as a replica; `link` is the replica's end of a link
    messages    what is said on a link
    pace        how fast copies are filled, and who is too slow
    effects     what the shell has to do; `receipt` has the files of discarded changes
    cluster_map the partition map that clients get
"""
