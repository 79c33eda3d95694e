"""A cluster of real processes under faults; `scripts/soak cluster` runs it, and the tests a part.

history, linearizable    what clients did with a key, and whether its answers can be right
flows, links             a network between nodes, metadata store and clients that can be cut
namespaces               the same with packets, in network namespaces
nodes                    three nodes and etcd behind that network
load                     writers, counters, compare-and-set, readers, a consumer
faults                   what can go wrong, and how it is healed
replicas                 documents of replicas held against those of the masters
run                      one seed: load and faults in turn, then every check
"""
