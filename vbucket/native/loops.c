/* The module vbucket.native.loops; loops.pyi has its interface. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "changes.h"
#include "compaction.h"
#include "crc32c.h"
#include "dict_ahead.h"
#include "frames.h"
#include "get_run.h"
#include "group_run.h"
#include "json_scan.h"
#include "json_text.h"
#include "key_hashes.h"
#include "key_tree.h"
#include "live_run.h"
#include "log_thread.h"
#include "packets.h"
#include "replay_run.h"
#include "set_run.h"
#include "staging.h"
#include "text_run.h"

static PyObject *checksum(PyObject *args, uint32_t (*way)(uint32_t, const uint8_t *, size_t))
{
    Py_buffer data;
    if (!PyArg_ParseTuple(args, "y*", &data))
        return NULL;
    uint32_t crc = way(0, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *loops_crc32c(PyObject *Py_UNUSED(module), PyObject *args)
{
    return checksum(args, crc32c);
}

static PyObject *loops_crc32c_by_tables(PyObject *Py_UNUSED(module), PyObject *args)
{
    return checksum(args, crc32c_by_tables);
}

static PyMethodDef functions[] = {
    {"crc32c", loops_crc32c, METH_VARARGS, NULL},
    {"crc32c_by_tables", loops_crc32c_by_tables, METH_VARARGS, NULL},
    {"is_json", py_is_json, METH_O, NULL},
    {"page_crcs", loops_page_crcs, METH_VARARGS, NULL},
    {"mark_json", py_mark_json, METH_VARARGS, NULL},
    {"entries_of", loops_entries_of, METH_VARARGS, NULL},
    {"frame_keys", loops_frame_keys, METH_VARARGS, NULL},
    {"add_hashes", loops_add_hashes, METH_VARARGS, NULL},
    {"rows_within", loops_rows_within, METH_VARARGS, NULL},
    {"repack", loops_repack, METH_VARARGS, NULL},
    {"cut_frames", loops_cut_frames, METH_VARARGS, NULL},
    {"join_frames", (PyCFunction)(void (*)(void))loops_join_frames, METH_FASTCALL, NULL},
    {"mutations_run", loops_mutations_run, METH_VARARGS, NULL},
    {"stored_run", loops_stored_run, METH_VARARGS, NULL},
    {"change_places", loops_change_places, METH_VARARGS, NULL},
    {"mutation_rows", loops_mutation_rows, METH_VARARGS, NULL},
    {"mutation_keys", loops_mutation_keys, METH_VARARGS, NULL},
    {"mutation_values", loops_mutation_values, METH_VARARGS, NULL},
    {"mutation_numbers", loops_mutation_numbers, METH_VARARGS, NULL},
    {"split_frames", loops_split_frames, METH_VARARGS, NULL},
    {"text_changes", loops_text_changes, METH_VARARGS, NULL},
    {"text_gets", loops_text_gets, METH_VARARGS, NULL},
    {"text_values", loops_text_values, METH_VARARGS, NULL},
    {"text_outcomes", loops_text_outcomes, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "vbucket.native.loops", .m_size = -1, .m_methods = functions,
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    int is_added = type != NULL && PyModule_AddObjectRef(module, name, type) == 0;
    Py_XDECREF(type);
    return is_added;
}

#ifdef __linux__
#define ADD_LOG_THREAD(module) add_type(module, "LogThread", &log_thread_spec)
#else
#define ADD_LOG_THREAD(module) 1 /* the thread of Python writes the log */
#endif

PyMODINIT_FUNC PyInit_loops(void)
{
    crc32c_init();
    json_scan_init();
    PyObject *module = PyModule_Create(&definition);
    int loads_ahead = dict_ahead_init();
    if (module != NULL && loads_ahead >= 0 && add_type(module, "Staged", &staged_spec) &&
        add_type(module, "Superseded", &superseded_spec) &&
        add_type(module, "ReplayRun", &replay_run_spec) &&
        add_type(module, "SetRun", &set_run_spec) &&
        add_type(module, "GroupRun", &group_run_spec) &&
        add_type(module, "GetRun", &get_run_spec) &&
        add_type(module, "KeyTree", &key_tree_spec) &&
        add_type(module, "LiveRun", &live_run_spec) &&
        add_type(module, "JsonScan", &json_scan_spec) &&
        ADD_LOG_THREAD(module) &&
        PyModule_AddStringConstant(module, "CRC32C_WAY", crc32c_way()) == 0 &&
        PyModule_AddIntConstant(module, "LOADS_DICTS_AHEAD", loads_ahead) == 0)
        return module;
    Py_XDECREF(module);
    return NULL;
}
