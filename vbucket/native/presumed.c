/* See presumed.h. Who calls it: group_run.c, replay_run.c. */

#include "presumed.h"

int presume(PyObject *presumed, PyObject *vb_id, PyObject *key)
{
    PyObject *keys = PyDict_GetItemWithError(presumed, vb_id);
    if (keys != NULL) {
        if (PyList_CheckExact(keys))
            return !PyList_Append(keys, key);
        PyErr_SetString(PyExc_TypeError, "keys are kept in lists");
        return 0;
    }
    if (PyErr_Occurred() || (keys = PyList_New(0)) == NULL)
        return 0;
    int is_noted = !PyList_Append(keys, key) && !PyDict_SetItem(presumed, vb_id, keys);
    Py_DECREF(keys);
    return is_noted;
}
