/* The type `Staged`: entries of the log, by partition, without a Python object for each. */

#ifndef DCPD_STAGING_H
#define DCPD_STAGING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec staged_spec;

#endif
