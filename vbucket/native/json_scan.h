/* Where the values at some paths stand in the text of a JSON document: one pass, in steps. The
   Python that defines it is dcp/session/subdoc/json_scan.py. */

#ifndef DCPD_JSON_SCAN_H
#define DCPD_JSON_SCAN_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Once, before the first scan. */
void json_scan_init(void);

extern PyType_Spec json_scan_spec;

#endif
