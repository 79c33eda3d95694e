/* See get_request.h. Who calls it: get_run.c. */

#include "get_request.h"

#include "blocks.h"
#include "set_request.h"

#include <string.h>

#define HEADER_BYTES 24
#define FLAGS_BYTES 4 /* the extras of an answer */
#define KEY_ENOENT 0x0001
#define GET 0x00
#define KEY_BYTES_AT 14 /* of an entry */
#define CAS_AT 28
#define FLAGS_AT 52
#define EXPIRY_AT 56
#define KEY_AT 67

int get_request_read(GetRequest *request, const uint8_t *at, size_t bytes)
{
    if (bytes < HEADER_BYTES || at[0] != 0x80 || at[1] != GET || at[4] || at[5])
        return 0;
    uint32_t key_bytes = be16(at + 2);
    if (key_bytes < 2 || key_bytes > KEY_BYTES_MAX || be32(at + 8) != key_bytes ||
        key_bytes > bytes - HEADER_BYTES || at[HEADER_BYTES])
        return 0;
    *request = (GetRequest){at, be16(at + 6), key_bytes};
    return 1;
}

size_t get_request_bytes(const GetRequest *request)
{
    return HEADER_BYTES + (size_t)request->key_bytes;
}

const uint8_t *get_request_key_at(const GetRequest *request)
{
    return request->at + HEADER_BYTES;
}

PyObject *get_request_key(const GetRequest *request)
{
    return PyBytes_FromStringAndSize((const char *)request->at + HEADER_BYTES,
                                     (Py_ssize_t)request->key_bytes);
}

int entry_is_shown(PyObject *entry, const GetRequest *request, uint8_t known, uint64_t now_s)
{
    if (!PyBytes_CheckExact(entry) ||
        PyBytes_GET_SIZE(entry) < KEY_AT + (Py_ssize_t)request->key_bytes)
        return 0;
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(entry);
    uint32_t expiry = be32(at + EXPIRY_AT);
    return at[OPCODE_AT] == MUTATION && be16(at + KEY_BYTES_AT) == request->key_bytes &&
           !(at[DATATYPE_AT] & ~(known | DATATYPE_JSON)) && (!expiry || expiry > now_s);
}

size_t entry_value_bytes(PyObject *entry, const GetRequest *request)
{
    return (size_t)PyBytes_GET_SIZE(entry) - KEY_AT - request->key_bytes;
}

size_t get_answer_bytes(PyObject *entry, const GetRequest *request)
{
    return HEADER_BYTES + (entry == NULL ? 0 : FLAGS_BYTES + entry_value_bytes(entry, request));
}

uint8_t *get_answer_write(uint8_t *at, PyObject *entry, const GetRequest *request, uint8_t known)
{
    memset(at, 0, HEADER_BYTES);
    at[0] = 0x81;
    at[1] = GET;
    memcpy(at + 12, request->at + 12, 4); /* opaque */
    if (entry == NULL) {
        put_be(at + 6, KEY_ENOENT, 2);
        return at + HEADER_BYTES;
    }
    const uint8_t *stored = (const uint8_t *)PyBytes_AS_STRING(entry);
    size_t value_bytes = entry_value_bytes(entry, request);
    at[4] = FLAGS_BYTES;
    at[5] = stored[DATATYPE_AT] & known;
    put_be(at + 8, FLAGS_BYTES + value_bytes, 4);
    memcpy(at + 16, stored + CAS_AT, 8);
    at += HEADER_BYTES;
    memcpy(at, stored + FLAGS_AT, FLAGS_BYTES);
    memcpy(at + FLAGS_BYTES, stored + KEY_AT + request->key_bytes, value_bytes);
    return at + FLAGS_BYTES + value_bytes;
}
