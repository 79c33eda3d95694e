"""The client of etcd, and the thread that renews a lease.

gRPC reads its settings when it is imported first, so they are set here, before any module of this
package imports it:

- it writes nothing to stderr, where our log is;
- it does nothing in forks. The store process is one until it runs its program, and gRPC would start
  threads in it, which crash now and then.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
