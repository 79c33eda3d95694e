/* Commit groups of a master, applied on a replica. */

#ifndef DCPD_GROUP_RUN_H
#define DCPD_GROUP_RUN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec group_run_spec;

#endif
