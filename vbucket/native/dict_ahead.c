/* See dict_ahead.h. Who calls it: set_run.c, get_run.c, loops.c.

   How a dictionary looks inside is in headers that are for Python itself, and do not compile
   everywhere. So the beginning is declared here, as it is from 3.11 to 3.14 in builds with the
   interpreter lock, and checked with a dictionary when the module is loaded.

   Invariant: only what the dictionary owns is read. An index is used if it is below the number of
   entries. */

#include "dict_ahead.h"

#include "key_tree.h"

#include <string.h>

/* _dictkeysobject of CPython: a table of indices of 1, 2, 4 or 8 bytes, then the entries. */
typedef struct {
    Py_ssize_t references;
    uint8_t log2_size, log2_index_bytes, kind;
    uint32_t version;
    Py_ssize_t usable, entries;
    char indices[];
} Keys;

typedef struct {
    Py_hash_t hash;
    PyObject *key, *value;
} Entry;

#define KIND_GENERAL 0 /* of keys that are not all strings */
#define IS_DECLARED (PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030f0000)

static int is_as_expected;

/* Returns the place in the table of indices where the search for a hash begins. */
static const char *index_of(const Keys *keys, Py_hash_t hash)
{
    size_t at = (size_t)hash & (((size_t)1 << keys->log2_size) - 1);
    return keys->indices + (at << (keys->log2_index_bytes - keys->log2_size));
}

/* Returns the entry that an index names, NULL if it names none. */
static const Entry *entry_of(const Keys *keys, const char *at)
{
    int64_t index;
    switch (keys->log2_index_bytes - keys->log2_size) {
    case 0: index = *(const int8_t *)at; break;
    case 1: index = *(const int16_t *)at; break;
    case 2: index = *(const int32_t *)at; break;
    default: index = *(const int64_t *)at; break;
    }
    if (index < 0 || index >= keys->entries)
        return NULL;
    return (const Entry *)(keys->indices + ((size_t)1 << keys->log2_index_bytes)) + index;
}

static const Keys *keys_of(const Lookup *lookup)
{
    return (const Keys *)((PyDictObject *)lookup->dict)->ma_keys;
}

void dicts_load(Lookup *lookups, size_t count)
{
    if (!is_as_expected)
        return;
    for (size_t i = 0; i < count; i++)
        PREFETCH(keys_of(&lookups[i]));
    for (size_t i = 0; i < count; i++) {
        const Keys *keys = keys_of(&lookups[i]);
        lookups[i].at = keys->kind == KIND_GENERAL ? index_of(keys, lookups[i].hash) : NULL;
        PREFETCH(lookups[i].at);
    }
    for (size_t i = 0; i < count; i++)
        if (lookups[i].at != NULL) {
            lookups[i].at = (const char *)entry_of(keys_of(&lookups[i]), lookups[i].at);
            PREFETCH(lookups[i].at);
        }
    for (size_t i = 0; i < count; i++) {
        const Entry *entry = (const Entry *)lookups[i].at;
        if (entry != NULL && entry->hash == lookups[i].hash) {
            PREFETCH(entry->key);
            PREFETCH(entry->value);
            PREFETCH((const char *)entry->value + 64);
        }
    }
}

/* Returns whether the search finds this key and value. */
static int is_found(PyObject *dict, PyObject *key, PyObject *value)
{
    Lookup lookup = {dict, PyObject_Hash(key), NULL};
    const Keys *keys = keys_of(&lookup);
    if (keys->entries != PyDict_GET_SIZE(dict) || keys->kind != KIND_GENERAL)
        return 0;
    const Entry *entry = entry_of(keys, index_of(keys, lookup.hash));
    return entry != NULL && entry->hash == lookup.hash && entry->key == key &&
           entry->value == value;
}

int dict_ahead_init(void)
{
#if IS_DECLARED && !defined(Py_GIL_DISABLED)
    PyObject *dict = PyDict_New(), *key = PyBytes_FromString("a key");
    int is_set = dict != NULL && key != NULL && !PyDict_SetItem(dict, key, Py_None);
    is_as_expected = is_set && is_found(dict, key, Py_None);
    Py_XDECREF(dict);
    Py_XDECREF(key);
    return is_set ? is_as_expected : -1;
#else
    return 0;
#endif
}
