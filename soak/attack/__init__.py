"""An unattended attack on real servers, data folders and backup archives, from outside.

    scripts/soak attack                           for ever, in cases; Ctrl-C prints the table
    scripts/soak attack --minutes 30 --kinds damage,archive
    scripts/soak attack --case 1000042            one case again

A case is made from its seed alone: its kind, and what is drawn for it. It attacks a server, and
ends with checks of everything that was promised (`soak.attack.case` has the three ways to fail). A
probe measures from another process how long a read, a NOOP and /livez go unanswered meanwhile.

    case.py       a case, and how it fails
    probe.py      the well-behaved client that measures
    truth.py      what a server has answered, and has to hold
    streams.py    what DCP streams show, from any position
    load.py       writers that note each answer
    harm.py       damage to files
    run.py        the loop, its state file;  table.py: the result

    processes.py  kill, stall     SIGKILL, SIGSTOP
    disks.py      disk, map       a full disk, a full LMDB map
    damage.py     damage          of every file of a data folder (folders.py makes them)
    archives.py   archive         the same for backups
    crowds.py     crowd, logins   half-sent requests; floods of logins
    cas.py        cas             absurd CAS, revisions, seqnos, expiries
    garbage.py    garbage         what is not the protocol
"""
