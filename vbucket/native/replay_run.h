/* The type `ReplayRun`: applies entries of the log to partitions at a start. */

#ifndef DCPD_REPLAY_RUN_H
#define DCPD_REPLAY_RUN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec replay_run_spec;

#endif
