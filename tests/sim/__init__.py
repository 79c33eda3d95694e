"""A simulator: whole nodes, clients and consumers in one process, from a seed.

Run it with `python -m tests.sim --seed N`. Nothing in it is a model of the product: sessions,
engine, log, store, merges, streams and the consumer's core are those that users run. Only the
network, the clocks and the disks are simulated, and they fail in every way that real ones do.

    world      virtual time: a heap of events and one source of randomness
    network    connections between hosts: delays, cuts, partitions
    clock      clocks that drift and jump
    machine    a host with disks, on which a node starts, dies and starts again
    node       what a simulated node must offer (SimNode), and a single node
    upkeep     its merges and compactions
    cluster    how nodes start and clients find them: the seam for replicated nodes
    serving    the server's side of one connection
    plan       what a seed decides: sizes, workload, kinds of faults
    faults     the kinds of faults, and when they happen
    acts       sequences of faults about elections
    broken     what stays broken for good, and what the rest must do
    cluster_faults  faults of clusters
    cluster_bugs    faults of replication that can be put in on purpose; all of them are PLANTED
    found      which seed finds each of them
    store_client    a node's client of the metadata store
    in_sync    looks at a cluster while it runs
    kv_client  clients that read and write over real frames
    kv_link    their connections
    workload   what they ask for
    prober     a client that scans, reads hashes, and changes documents in batches
    routing    where the nodes are
    consumer   consumers with checkpoints
    facts      what happened, as data
    ledger     all that was ever committed
    checkers   rules over these facts
    checks     all of them by name, and their rules in words
    moments    what happened, as a story tells it
    run        one seed from beginning to end
    reached    what seeds have reached, counted
    story      a failing seed, for people
    unserved   why nobody serves a partition
    decoded    a trace's messages, for people
    shrink     makes a failing seed smaller
    seed_range many seeds, on several processors
    command    the command line
    demo       a story of deaths while many documents are loaded (scripts/sim-demo)
"""
