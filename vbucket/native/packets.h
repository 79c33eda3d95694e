/* Frames that come from elsewhere (vbucket/engine/loading/bulk.py), and those of archives
   (clients/backup/strip.py). */

#ifndef DCPD_PACKETS_H
#define DCPD_PACKETS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *loops_entries_of(PyObject *module, PyObject *args);
PyObject *loops_split_frames(PyObject *module, PyObject *args);
PyObject *loops_frame_keys(PyObject *module, PyObject *args);

#endif
