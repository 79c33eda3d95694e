/* The bytes of a SET: its request, its entry, and its answer. */

#ifndef DCPD_SET_REQUEST_H
#define DCPD_SET_REQUEST_H

#include "key_form.h"

#define REQUEST_HEAD_BYTES 32 /* of a SET: header, flags and expiry */
#define KEY_BYTES_MAX 251 /* the longest key, and the id of the default collection */
#define DATATYPE_JSON 0x01
#define OPCODE_AT 13
#define DATATYPE_AT 17
#define SEQNO_AT 36
#define REV_SEQNO_AT 44
#define NUMBERS_END 52 /* of an entry, after its revision */

typedef struct {
    const uint8_t *at;
    uint32_t vb_id, key_bytes, value_bytes; /* the key is that which is stored, with its prefix */
    uint32_t expiry;                        /* Unix seconds; 0: never */
    uint8_t form;
} Request;

/* What all requests of a client share. `json`: the datatypes that it negotiated. */
typedef struct {
    uint64_t value_bytes_max;
    uint32_t partitions, now_s;
    uint8_t json, form;
} Reader;

/* What a change needs from the version that it replaces. */
typedef struct {
    uint64_t seqno, rev_seqno;
    uint8_t opcode, datatype;
} Old;

/* Reads a request. Returns 0 if it is no plain SET, or not there wholly. What is stored says
   whether the value is JSON. */
int request_read(Request *request, const Reader *reader, const uint8_t *at, size_t bytes);

/* Whether nobody waits for the answer of a request that succeeds. */
int request_is_quiet(const Request *request);

/* Where the next request begins, from the beginning of this one. */
static inline size_t request_bytes(const Request *request)
{
    return REQUEST_HEAD_BYTES + (size_t)request->key_bytes - (request->form & UNPREFIXED) +
           request->value_bytes;
}

/* Writes the stored key. */
static inline void request_key_write(const Request *request, uint8_t *to)
{
    key_write(to, request->at + REQUEST_HEAD_BYTES, request->key_bytes, request->form);
}

/* These return bytes, or NULL with an exception. */
PyObject *entry_made(const Request *request, const Old *old, uint64_t epoch, uint64_t cas,
                     uint64_t seqno);
PyObject *answer_made(const Request *request, uint64_t cas, uint64_t vb_uuid, uint64_t seqno);

#endif
