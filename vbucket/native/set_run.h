/* The type `SetRun`: applies the plain changes of one read. */

#ifndef DCPD_SET_RUN_H
#define DCPD_SET_RUN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec set_run_spec;

#endif
