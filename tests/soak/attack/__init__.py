"""An unattended attack on real servers, data folders and backup archives, from outside.

    scripts/soak attack                           runs until Ctrl-C, then prints the table
    scripts/soak attack --minutes 30 --kinds damage,archive
    scripts/soak attack --case 1000042            repeats one case

A case depends only on its seed: its kind, and everything random in it. It attacks a server, then
checks everything that the server has promised (`tests.soak.attack.case` lists the three ways to
fail). Meanwhile a probe in its own process measures how long a read, a NOOP and /livez stay
unanswered.

    case.py       a case, and how it fails
    probe.py      the well-behaved client that measures
    truth.py      what a server has answered and therefore must hold
    streams.py    what DCP streams send, from any position
    load.py       a writer that records each answer
    harm.py       damage to files
    run.py        the loop and its state file;  table.py: the result

    processes.py  kill, stall     SIGKILL, SIGSTOP
    disks.py      disk, map       a full disk, a full LMDB map
    damage.py     damage          damaged files of a data folder (folders.py makes the folders)
    archives.py   archive         damaged files of a backup archive
    crowds.py     crowd, logins   half-sent requests; floods of logins
    cas.py        cas             absurd CAS, revisions, seqnos, expiries
    garbage.py    garbage         input that is not the protocol
    arrays.py     arrays          look-ups into large arrays, changes of them
    starved.py    starved         nodes of a cluster that run a tenth of the time
"""
