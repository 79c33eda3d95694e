/* See set_request.h. Who calls it: set_run.c. */

#include "set_request.h"

#include "blocks.h"
#include "json_text.h"

#include <string.h>

#define HEADER_BYTES 24
#define SET 0x01
#define SETQ 0x11
#define TOKEN_BYTES 16
#define RELATIVE_EXPIRY_MAX_S (30 * 24 * 3600) /* dcp/session/kv/documents.py */
#define EXPIRY_AT 56
#define ENTRY_HEAD_BYTES 67
#define MUTATION_EXTRAS_BYTES 31
#define REV_SEQNO_MAX (((uint64_t)1 << 48) - 1)

int request_read(Request *request, const Reader *reader, const uint8_t *at, size_t bytes)
{
    uint8_t form = reader->form;
    if (bytes < REQUEST_HEAD_BYTES || at[0] != 0x80 || at[4] != 8 || at[5] & ~reader->json ||
        (at[1] != SET && !(at[1] == SETQ && form & QUIET)))
        return 0;
    uint32_t wire_bytes = be16(at + 2), body_bytes = be32(at + 8);
    if (body_bytes > bytes - HEADER_BYTES || body_bytes < 8 + wire_bytes)
        return 0;
    uint32_t key_bytes = wire_bytes + (form & UNPREFIXED);
    if (key_bytes < 2 || key_bytes > KEY_BYTES_MAX ||
        (!(form & UNPREFIXED) && at[REQUEST_HEAD_BYTES]))
        return 0;
    uint32_t value_bytes = body_bytes - 8 - wire_bytes;
    if (be64(at + 16) || value_bytes > reader->value_bytes_max)
        return 0;
    uint32_t vb_id = form & HASHED
                         ? vbucket_of(at + REQUEST_HEAD_BYTES, wire_bytes, reader->partitions)
                         : be16(at + 6);
    uint32_t expiry = be32(at + 28);
    if (expiry && expiry <= RELATIVE_EXPIRY_MAX_S)
        expiry += reader->now_s;
    *request = (Request){at, vb_id, key_bytes, value_bytes, expiry, form};
    return 1;
}

int request_is_quiet(const Request *request)
{
    return request->at[1] == SETQ;
}

PyObject *entry_made(const Request *request, const Old *old, uint64_t epoch, uint64_t cas,
                     uint64_t seqno)
{
    uint32_t body_bytes = request->key_bytes + request->value_bytes;
    PyObject *entry = PyBytes_FromStringAndSize(NULL, ENTRY_HEAD_BYTES + (Py_ssize_t)body_bytes);
    if (entry == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(entry);
    put_be(at, old->seqno, 8);
    put_be(at + 8, epoch, 4);
    at[12] = 0x80;
    at[OPCODE_AT] = MUTATION;
    put_be(at + 14, request->key_bytes, 2);
    at[16] = MUTATION_EXTRAS_BYTES;
    const uint8_t *value = request->at + request_bytes(request) - request->value_bytes;
    at[DATATYPE_AT] = json_is_sound(value, request->value_bytes) ? DATATYPE_JSON : 0;
    put_be(at + 18, request->vb_id, 2);
    put_be(at + 20, MUTATION_EXTRAS_BYTES + body_bytes, 4);
    memset(at + 24, 0, 4);
    put_be(at + 28, cas, 8);
    put_be(at + SEQNO_AT, seqno, 8);
    put_be(at + REV_SEQNO_AT, old->rev_seqno + (old->rev_seqno < REV_SEQNO_MAX), 8);
    memcpy(at + NUMBERS_END, request->at + HEADER_BYTES, 4); /* flags */
    put_be(at + EXPIRY_AT, request->expiry, 4);
    memset(at + EXPIRY_AT + 4, 0, ENTRY_HEAD_BYTES - EXPIRY_AT - 4);
    request_key_write(request, at + ENTRY_HEAD_BYTES);
    memcpy(at + ENTRY_HEAD_BYTES + request->key_bytes, value, request->value_bytes);
    return entry;
}

PyObject *answer_made(const Request *request, uint64_t cas, uint64_t vb_uuid, uint64_t seqno)
{
    uint8_t token_bytes = request->form & TOKENS ? TOKEN_BYTES : 0;
    PyObject *answer = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + token_bytes);
    if (answer == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(answer);
    memset(at, 0, 12);
    at[0] = 0x81;
    at[1] = SET;
    at[4] = at[11] = token_bytes;
    memcpy(at + 12, request->at + 12, 4); /* opaque */
    put_be(at + 16, cas, 8);
    if (token_bytes) {
        put_be(at + 24, vb_uuid, 8);
        put_be(at + 32, seqno, 8);
    }
    return answer;
}
