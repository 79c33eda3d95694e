/* The type `LiveRun`: whole snapshots of live streams, cut at once. */

#ifndef DCPD_LIVE_RUN_H
#define DCPD_LIVE_RUN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec live_run_spec;

#endif
