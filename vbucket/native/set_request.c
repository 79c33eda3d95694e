/* See set_request.h. Who calls it: set_run.c. */

#include "set_request.h"

#include "blocks.h"
#include "json_text.h"

#include <string.h>

#define TOKEN_BYTES 16
#define NUMBER_BYTES 8
#define FLAGS_BYTES 4
#define RELATIVE_EXPIRY_MAX_S (30 * 24 * 3600) /* dcp/session/kv/documents.py */
#define MUTATION_EXTRAS_BYTES 31
#define DELETION_EXTRAS_BYTES 18
#define DELETION_HEAD_BYTES 54
#define REV_SEQNO_MAX (((uint64_t)1 << 48) - 1)

/* Opcode -> what it means. No extras: it is no plain change, or a removal. */
static const struct {
    uint8_t is_known, kind, extras_bytes, is_quiet;
} meanings[] = {
    [0x01] = {1, STORE, 8, 0}, [0x11] = {1, STORE, 8, 1},     /* SET, SETQ */
    [0x02] = {1, ADD, 8, 0}, [0x12] = {1, ADD, 8, 1},         /* ADD, ADDQ */
    [0x03] = {1, REPLACE, 8, 0}, [0x13] = {1, REPLACE, 8, 1}, /* REPLACE, REPLACEQ */
    [0x04] = {1, REMOVE, 0, 0}, [0x14] = {1, REMOVE, 0, 1},   /* DELETE, DELETEQ */
    [0x05] = {1, COUNT, 20, 0}, [0x15] = {1, COUNT, 20, 1},   /* INCREMENT, INCREMENTQ */
    [0x06] = {1, COUNT, 20, 0}, [0x16] = {1, COUNT, 20, 1},   /* DECREMENT, DECREMENTQ */
    [0x0e] = {1, APPEND, 0, 0}, [0x19] = {1, APPEND, 0, 1},   /* APPEND, APPENDQ */
    [0x0f] = {1, PREPEND, 0, 0}, [0x1a] = {1, PREPEND, 0, 1}, /* PREPEND, PREPENDQ */
    [0x1c] = {1, TOUCH, 4, 0},                                /* TOUCH */
    /* GAT, and GATQ, which is quiet about misses only */
    [0x1d] = {1, GET_AND_TOUCH, 4, 0}, [0x1e] = {1, GET_AND_TOUCH, 4, 0},
};

/* Where the requests that have one have their expiry, behind the header. */
static const uint8_t expiry_at[] = {[STORE] = 4, [ADD] = 4, [REPLACE] = 4, [COUNT] = 16,
                                    [TOUCH] = 0, [GET_AND_TOUCH] = 0};

static int has_value(uint8_t kind)
{
    return kind <= REPLACE || kind == APPEND || kind == PREPEND;
}

/* Takes opcode, extras and datatype of a header. Returns 0 if they are not those of a plain
   change. */
static int meaning_read(Request *request, const Reader *reader, const uint8_t *at, size_t bytes)
{
    if (bytes < HEADER_BYTES || at[0] != 0x80 || at[1] >= sizeof meanings / sizeof meanings[0] ||
        !meanings[at[1]].is_known || at[4] != meanings[at[1]].extras_bytes)
        return 0;
    *request = (Request){.at = at, .form = reader->form, .kind = meanings[at[1]].kind,
                         .is_quiet = meanings[at[1]].is_quiet, .extras_bytes = at[4],
                         .json = reader->json};
    if ((request->is_quiet || request->kind >= TOUCH) && !(reader->form & UNMARKED))
        return 0;
    return !(at[5] & ~(request->kind <= REPLACE ? reader->json : 0));
}

int request_read(Request *request, const Reader *reader, const uint8_t *at, size_t bytes)
{
    uint8_t form = reader->form;
    if (!meaning_read(request, reader, at, bytes))
        return 0;
    uint32_t wire_bytes = be16(at + 2), body_bytes = be32(at + 8);
    uint32_t before_value = request->extras_bytes + wire_bytes;
    if (body_bytes > bytes - HEADER_BYTES || body_bytes < before_value)
        return 0;
    const uint8_t *extras = at + HEADER_BYTES, *key = extras + request->extras_bytes;
    request->key_bytes = wire_bytes + (form & UNPREFIXED);
    if (request->key_bytes < 2 || request->key_bytes > KEY_BYTES_MAX ||
        (!(form & UNPREFIXED) && *key))
        return 0;
    request->value_bytes = body_bytes - before_value;
    if (request->value_bytes > (has_value(request->kind) ? reader->value_bytes_max : 0))
        return 0;
    request->vb_id = form & HASHED ? vbucket_of(key, wire_bytes, reader->partitions)
                                   : be16(at + 6);
    if (request->extras_bytes)
        request->expiry = be32(extras + expiry_at[request->kind]);
    if (request->expiry && request->expiry <= RELATIVE_EXPIRY_MAX_S)
        request->expiry += reader->now_s;
    request->cas = request->kind >= TOUCH ? 0 : be64(at + 16);
    return 1;
}

PyObject *entry_made(const Request *request, const Old *old, const Stamp *stamp,
                     const Content *content)
{
    int is_removal = request->kind == REMOVE;
    size_t value_bytes = is_removal ? 0 : content->value_bytes + content->more_bytes;
    size_t head_bytes = is_removal ? DELETION_HEAD_BYTES : ENTRY_HEAD_BYTES;
    uint8_t extras_bytes = is_removal ? DELETION_EXTRAS_BYTES : MUTATION_EXTRAS_BYTES;
    size_t body_bytes = request->key_bytes + value_bytes;
    PyObject *entry = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(head_bytes + body_bytes));
    if (entry == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(entry);
    put_be(at, old->seqno, 8);
    put_be(at + 8, stamp->epoch, 4);
    at[12] = 0x80;
    at[OPCODE_AT] = is_removal ? DELETION : MUTATION;
    put_be(at + 14, request->key_bytes, 2);
    at[16] = extras_bytes;
    at[DATATYPE_AT] = 0;
    put_be(at + 18, request->vb_id, 2);
    put_be(at + 20, extras_bytes + body_bytes, 4);
    memset(at + 24, 0, 4);
    put_be(at + CAS_AT, stamp->cas, 8);
    put_be(at + SEQNO_AT, stamp->seqno, 8);
    put_be(at + REV_SEQNO_AT, old->rev_seqno + (old->rev_seqno < REV_SEQNO_MAX), 8);
    memset(at + NUMBERS_END, 0, head_bytes - NUMBERS_END);
    request_key_write(request, at + head_bytes);
    if (!is_removal) {
        uint8_t *value = at + head_bytes + request->key_bytes;
        memcpy(at + NUMBERS_END, content->flags, 4);
        put_be(at + EXPIRY_AT, content->expiry, 4);
        memcpy(value, content->value, content->value_bytes);
        if (content->more_bytes)
            memcpy(value + content->value_bytes, content->more, content->more_bytes);
        at[DATATYPE_AT] = json_is_sound(value, value_bytes) ? DATATYPE_JSON : 0;
    }
    return entry;
}

/* Answers with the document, which may be long. */
static PyObject *document_made(const Request *request, const Stamp *stamp, const Content *content,
                               PyObject *entry)
{
    PyObject *answer = PyBytes_FromStringAndSize(
        NULL, HEADER_BYTES + FLAGS_BYTES + (Py_ssize_t)content->value_bytes);
    if (answer == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(answer);
    memset(at, 0, HEADER_BYTES);
    at[0] = 0x81;
    at[1] = request->at[1];
    at[4] = FLAGS_BYTES;
    at[5] = (uint8_t)PyBytes_AS_STRING(entry)[DATATYPE_AT] & request->json;
    put_be(at + 8, FLAGS_BYTES + content->value_bytes, 4);
    memcpy(at + 12, request->at + 12, 4); /* opaque */
    put_be(at + 16, stamp->cas, 8);
    memcpy(at + HEADER_BYTES, content->flags, FLAGS_BYTES);
    memcpy(at + HEADER_BYTES + FLAGS_BYTES, content->value, content->value_bytes);
    return answer;
}

PyObject *answer_made(const Request *request, const Stamp *stamp, const Content *content,
                      PyObject *entry)
{
    if (entry == NULL)
        return NULL;
    if (request->kind == GET_AND_TOUCH)
        return document_made(request, stamp, content, entry);
    uint8_t token_bytes = request->form & TOKENS && request->kind != TOUCH ? TOKEN_BYTES : 0;
    uint8_t body_bytes = token_bytes + (request->kind == COUNT ? NUMBER_BYTES : 0);
    int shows_cas = request->kind != REMOVE || !(request->form & HASHED);
    PyObject *answer = PyBytes_FromStringAndSize(NULL, HEADER_BYTES + body_bytes);
    if (answer == NULL)
        return NULL;
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(answer);
    memset(at, 0, 12);
    at[0] = 0x81;
    at[1] = request->at[1];
    at[4] = token_bytes;
    at[11] = body_bytes;
    memcpy(at + 12, request->at + 12, 4); /* opaque */
    put_be(at + 16, shows_cas ? stamp->cas : 0, 8);
    if (token_bytes) {
        put_be(at + 24, stamp->vb_uuid, 8);
        put_be(at + 32, stamp->seqno, 8);
    }
    if (request->kind == COUNT)
        put_be(at + HEADER_BYTES + token_bytes, content->number, NUMBER_BYTES);
    return answer;
}

PyObject *refusal_made(const Request *request, PyObject *model)
{
    PyObject *answer = PyBytes_FromStringAndSize(PyBytes_AS_STRING(model),
                                                 PyBytes_GET_SIZE(model));
    if (answer == NULL)
        return NULL;
    PyBytes_AS_STRING(answer)[1] = (char)request->at[1];
    memcpy(PyBytes_AS_STRING(answer) + 12, request->at + 12, 4); /* opaque */
    return answer;
}
