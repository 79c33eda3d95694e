/* The bytes of a change: its request, its entry, and its answer. */

#ifndef DCPD_SET_REQUEST_H
#define DCPD_SET_REQUEST_H

#include "key_form.h"

#define HEADER_BYTES 24
#define KEY_BYTES_MAX 251 /* the longest key, and the id of the default collection */
#define DATATYPE_JSON 0x01
#define OPCODE_AT 13
#define DATATYPE_AT 17
#define CAS_AT 28
#define SEQNO_AT 36
#define REV_SEQNO_AT 44
#define NUMBERS_END 52 /* of an entry, after its revision: the flags of a mutation */
#define EXPIRY_AT 56   /* of a mutation */
#define ENTRY_HEAD_BYTES 67
#define NUMBER_DIGITS 20 /* of the largest counter */

/* What a request wants. Those from COUNT on make a new value of the present one. */
enum { STORE, ADD, REPLACE, REMOVE, COUNT, APPEND, PREPEND, TOUCH, GET_AND_TOUCH };

typedef struct {
    const uint8_t *at;
    uint32_t vb_id, key_bytes, value_bytes; /* the key is that which is stored, with its prefix */
    uint32_t expiry;                        /* Unix seconds; 0: never */
    uint64_t cas;                           /* 0: any */
    uint8_t form, json, kind, is_quiet, extras_bytes;
} Request;

/* What all requests of a client share. `json`: the datatypes that it negotiated. */
typedef struct {
    uint64_t value_bytes_max;
    uint32_t partitions, now_s;
    uint8_t json, form;
} Reader;

/* What a change needs from the version that it replaces. */
typedef struct {
    uint64_t seqno, rev_seqno, cas;
    uint32_t expiry;
    uint8_t opcode, datatype;
} Old;

/* What a mutation stores. */
typedef struct {
    const uint8_t *flags, *value, *more; /* flags: 4 bytes; `more` comes behind the value */
    size_t value_bytes, more_bytes;
    uint32_t expiry;
    uint64_t number;              /* of a counter */
    uint8_t digits[NUMBER_DIGITS];
} Content;

/* What a change gets. */
typedef struct {
    uint64_t epoch, cas, seqno, vb_uuid;
} Stamp;

/* Reads a request. Returns 0 if it is no plain change, or not there wholly. What is stored says
   whether the value is JSON. */
int request_read(Request *request, const Reader *reader, const uint8_t *at, size_t bytes);

/* Whether a request depends on what it replaces. */
static inline int request_is_conditional(const Request *request)
{
    return request->kind != STORE || request->cas;
}

/* Where the next request begins, from the beginning of this one. */
static inline size_t request_bytes(const Request *request)
{
    return HEADER_BYTES + request->extras_bytes + (size_t)request->key_bytes -
           (request->form & UNPREFIXED) + request->value_bytes;
}

/* Writes the stored key. */
static inline void request_key_write(const Request *request, uint8_t *to)
{
    key_write(to, request->at + HEADER_BYTES + request->extras_bytes, request->key_bytes,
              request->form);
}

/* These return bytes, or NULL with an exception. `content` is not used for a removal. `model` is
   the answer of a refusal, but for opcode and opaque. */
PyObject *entry_made(const Request *request, const Old *old, const Stamp *stamp,
                     const Content *content);
PyObject *answer_made(const Request *request, const Stamp *stamp, const Content *content,
                      PyObject *entry);
PyObject *refusal_made(const Request *request, PyObject *model);

#endif
