/* See get_request.h. Who calls it: get_run.c. */

#include "get_request.h"

#include "blocks.h"
#include "set_request.h"

#include <string.h>

#define FLAGS_BYTES 4 /* the extras of an answer */
#define KEY_ENOENT 0x0001
#define GET 0x00
#define GETQ 0x09
#define GETK 0x0c
#define GETKQ 0x0d
#define KEY_BYTES_AT 14 /* of an entry */
#define FLAGS_AT 52
#define KEY_AT 67

static int is_quiet(const GetRequest *request)
{
    return request->at[1] == GETQ || request->at[1] == GETKQ;
}

static size_t wire_key_bytes(const GetRequest *request)
{
    return (size_t)request->key_bytes - (request->form & UNPREFIXED);
}

/* Bytes of the key in an answer. */
static size_t shown_key_bytes(const GetRequest *request)
{
    return request->at[1] == GETK || request->at[1] == GETKQ ? wire_key_bytes(request) : 0;
}

int get_request_read(GetRequest *request, const uint8_t *at, size_t bytes, uint8_t form,
                     uint32_t partitions)
{
    if (bytes < HEADER_BYTES || at[0] != 0x80 || at[4] || at[5] ||
        (at[1] != GET && at[1] != GETQ && at[1] != GETK && at[1] != GETKQ))
        return 0;
    uint32_t wire_bytes = be16(at + 2), key_bytes = wire_bytes + (form & UNPREFIXED);
    if (key_bytes < 2 || key_bytes > KEY_BYTES_MAX || be32(at + 8) != wire_bytes ||
        wire_bytes > bytes - HEADER_BYTES || (!(form & UNPREFIXED) && at[HEADER_BYTES]))
        return 0;
    uint32_t vb_id = form & HASHED ? vbucket_of(at + HEADER_BYTES, wire_bytes, partitions)
                                   : be16(at + 6);
    *request = (GetRequest){at, vb_id, key_bytes, form};
    return 1;
}

size_t get_request_bytes(const GetRequest *request)
{
    return HEADER_BYTES + wire_key_bytes(request);
}

void get_request_key_write(const GetRequest *request, uint8_t *to)
{
    key_write(to, request->at + HEADER_BYTES, request->key_bytes, request->form);
}

PyObject *get_request_key(const GetRequest *request)
{
    PyObject *key = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)request->key_bytes);
    if (key != NULL)
        get_request_key_write(request, (uint8_t *)PyBytes_AS_STRING(key));
    return key;
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

size_t get_answer_bytes(PyObject *entry, const GetRequest *request, const MissText *miss)
{
    if (entry == NULL)
        return is_quiet(request) ? 0 : HEADER_BYTES + miss->bytes;
    return HEADER_BYTES + FLAGS_BYTES + shown_key_bytes(request) +
           entry_value_bytes(entry, request);
}

uint8_t *get_answer_write(uint8_t *at, PyObject *entry, const GetRequest *request, uint8_t known,
                          const MissText *miss)
{
    memset(at, 0, HEADER_BYTES);
    at[0] = 0x81;
    at[1] = request->at[1];
    memcpy(at + 12, request->at + 12, 4); /* opaque */
    if (entry == NULL) {
        put_be(at + 6, KEY_ENOENT, 2);
        put_be(at + 8, miss->bytes, 4);
        memcpy(at + HEADER_BYTES, miss->at, miss->bytes);
        return at + HEADER_BYTES + miss->bytes;
    }
    const uint8_t *stored = (const uint8_t *)PyBytes_AS_STRING(entry);
    size_t value_bytes = entry_value_bytes(entry, request), key_bytes = shown_key_bytes(request);
    put_be(at + 2, key_bytes, 2);
    at[4] = FLAGS_BYTES;
    at[5] = stored[DATATYPE_AT] & known;
    put_be(at + 8, FLAGS_BYTES + key_bytes + value_bytes, 4);
    memcpy(at + 16, stored + CAS_AT, 8);
    at += HEADER_BYTES;
    memcpy(at, stored + FLAGS_AT, FLAGS_BYTES);
    memcpy(at + FLAGS_BYTES, request->at + HEADER_BYTES, key_bytes);
    memcpy(at + FLAGS_BYTES + key_bytes, stored + KEY_AT + request->key_bytes, value_bytes);
    return at + FLAGS_BYTES + key_bytes + value_bytes;
}
