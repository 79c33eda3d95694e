/* See counts.h. */

#include "counts.h"

Collection *collection_of(Others *others, const uint8_t *key, uint32_t key_bytes)
{
    uint64_t id = 0;
    uint32_t at = 0;
    do {
        if (at == key_bytes || at == 5)
            return NULL;
        id |= (uint64_t)(key[at] & 0x7F) << 7 * at;
    } while (key[at++] & 0x80);
    if (at > 1 && !key[at - 1])
        return NULL; /* padded: Python refuses it */
    for (size_t i = 0; i < others->count; i++)
        if (others->items[i].id == id)
            return &others->items[i];
    if (others->count == COLLECTIONS_MAX || id > UINT32_MAX)
        return NULL;
    others->items[others->count] = (Collection){(uint32_t)id, 0, 0};
    return &others->items[others->count++];
}

PyObject *others_tuple(const Others *others)
{
    PyObject *list = PyList_New((Py_ssize_t)others->count);
    for (size_t i = 0; list != NULL && i < others->count; i++) {
        const Collection *item = &others->items[i];
        PyObject *row = Py_BuildValue("IKn", item->id, (unsigned long long)item->high_seqno,
                                      item->documents);
        if (row == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, row);
    }
    if (list == NULL)
        return NULL;
    return Py_BuildValue("KKN", (unsigned long long)others->other_high_seqno,
                         (unsigned long long)others->default_high_seqno, list);
}
