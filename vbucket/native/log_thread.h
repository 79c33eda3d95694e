/* The type `LogThread`: writes and syncs the log without the interpreter lock. */

#ifndef DCPD_LOG_THREAD_H
#define DCPD_LOG_THREAD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyType_Spec log_thread_spec;

#endif
