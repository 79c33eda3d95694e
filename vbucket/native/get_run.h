/* The type `GetRun`: answers plain GETs that come together. */

#ifndef DCPD_GET_RUN_H
#define DCPD_GET_RUN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec get_run_spec;

#endif
