/* See blocks.h. Invariant: what is made here equals what vbucket/store/block.py makes of the same
   versions, byte by byte. */

#include "blocks.h"

#include "crc32c.h"

#include <string.h>

#define FORMAT 1
#define HEADER_BYTES 48
#define CRC_AT (HEADER_BYTES - 4)
#define FRAME_HEADER_BYTES 24
#define HAS_SEQNOS 0x01
#define ONLY_MUTATIONS 0x02
#define ONLY_RAW 0x04
#define PACKED 0x08 /* these two say that there is something, the two before that there is not */
#define XATTRS 0x10
#define DATATYPE_SNAPPY 0x02
#define DATATYPE_XATTR 0x04

/* Whether they do, from `first_seqno` to `last_seqno`, and do not begin with 0. */
static int seqnos_ascend(const Block *block)
{
    uint64_t before = 0;
    if (block_seqno(block, 0) != block->first_seqno ||
        block_seqno(block, block->count - 1) != block->last_seqno)
        return 0;
    for (uint32_t i = 0; i < block->count; i++) {
        uint64_t seqno = block_seqno(block, i);
        if (seqno <= before)
            return 0;
        before = seqno;
    }
    return 1;
}

int block_open(Block *block, const uint8_t *key, size_t key_bytes, const uint8_t *value,
               size_t bytes)
{
    if (key_bytes != BLOCK_KEY_BYTES || bytes < HEADER_BYTES || value[0] != FORMAT)
        return 0;
    int has_seqnos = value[1] & HAS_SEQNOS;
    uint32_t count = (uint32_t)le(value + 4, 4);
    /* In 64 bits, because on a machine of 32 bits these numbers could overflow. */
    uint64_t columns = (uint64_t)count * (has_seqnos ? 24 : 16), body_bytes = le(value + 36, 4);
    if (!count || HEADER_BYTES + columns + body_bytes != bytes)
        return 0;
    size_t columns_bytes = (size_t)columns;
    block->body_bytes = (size_t)body_bytes;
    uint32_t crc = crc32c(0, key, key_bytes);
    crc = crc32c(crc, value, CRC_AT);
    crc = crc32c(crc, value + HEADER_BYTES, columns_bytes);
    if (crc != le(value + CRC_AT, 4))
        return 0;
    block->vb_id = be16(key);
    block->count = count;
    block->epoch = (uint32_t)le(value + 8, 4);
    block->seqno_before = le(value + 12, 8);
    block->first_seqno = le(value + 20, 8);
    block->last_seqno = le(value + 28, 8);
    block->body_crc = (uint32_t)le(value + 40, 4);
    block->ends = value + HEADER_BYTES;
    block->crcs = block->ends + 4 * (size_t)count;
    block->prev_seqnos = block->crcs + 4 * (size_t)count;
    block->seqnos = has_seqnos ? block->prev_seqnos + 8 * (size_t)count : NULL;
    block->body = value + HEADER_BYTES + columns_bytes;
    if (block->first_seqno != be64(key + 2))
        return 0;
    uint64_t end = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t next = le(block->ends + 4 * (size_t)i, 4);
        if (next < end + 6) /* a frame has at least its opcode and datatype */
            return 0;
        end = next;
    }
    return end == block->body_bytes && seqnos_ascend(block);
}

/* Returns the index of the first seqno at or above this one. */
static size_t seqno_index(const uint8_t *seqnos, size_t count, uint64_t seqno)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (le(seqnos + 8 * middle, 8) < seqno)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Whether a frame is that which is meant. */
static int is_frame_of(const uint8_t *frame, size_t bytes, uint32_t vb_id, const FrameOf *of)
{
    if (bytes < FRAME_HEADER_BYTES + 8)
        return 0;
    size_t key_at = FRAME_HEADER_BYTES + (size_t)frame[4];
    return be16(frame + 2) == of->key_bytes && be16(frame + 6) == vb_id &&
           FRAME_HEADER_BYTES + (uint64_t)be32(frame + 8) == bytes && be64(frame + 16) == of->cas &&
           be64(frame + FRAME_HEADER_BYTES) == of->seqno && key_at + of->key_bytes <= bytes &&
           !memcmp(frame + key_at, of->key, of->key_bytes);
}

const uint8_t *block_find_frame(const uint8_t *block_key, size_t block_key_bytes,
                                const uint8_t *value, size_t bytes, const FrameOf *of,
                                size_t *frame_bytes)
{
    if (block_key_bytes != BLOCK_KEY_BYTES || bytes < HEADER_BYTES)
        return NULL;
    size_t count = (size_t)le(value + 4, 4);
    int has_seqnos = value[1] & HAS_SEQNOS;
    if (count > (bytes - HEADER_BYTES) / (has_seqnos ? 24 : 16))
        return NULL;
    const uint8_t *ends = value + HEADER_BYTES, *crcs = ends + 4 * count;
    const uint8_t *seqnos = crcs + 12 * count, *body = seqnos + (has_seqnos ? 8 * count : 0);
    uint64_t first = be64(block_key + 2);
    uint64_t index = has_seqnos ? seqno_index(seqnos, count, of->seqno) : of->seqno - first;
    if (of->seqno < first || index >= count)
        return NULL;
    uint64_t start = index ? le(ends + 4 * (index - 1), 4) : 0, end = le(ends + 4 * index, 4);
    if (start > end || end > (size_t)(value + bytes - body))
        return NULL;
    *frame_bytes = (size_t)(end - start);
    if (!is_frame_of(body + start, *frame_bytes, be16(block_key), of) ||
        crc32c(0, body + start, *frame_bytes) != le(crcs + 4 * index, 4))
        return NULL;
    return body + start;
}

int block_body_is_sound(const Block *block)
{
    return crc32c(0, block->body, block->body_bytes) == block->body_crc;
}

int versions_reserve(Versions *versions, size_t more)
{
    size_t needed = versions->count + more;
    if (needed <= versions->room)
        return 1;
    size_t room = needed > 2 * versions->room ? needed : 2 * versions->room;
    Version *items = NULL;
    if (room <= PY_SSIZE_T_MAX / sizeof(Version))
        items = PyMem_Realloc(versions->items, room * sizeof(Version));
    if (items == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    versions->items = items;
    versions->room = room;
    return 1;
}

int versions_add_block(Versions *versions, const Block *block, const uint8_t *kept)
{
    if (!versions_reserve(versions, block->count))
        return 0;
    uint32_t start = 0;
    for (uint32_t i = 0; i < block->count; i++) {
        uint32_t end = (uint32_t)le(block->ends + 4 * (size_t)i, 4);
        if (kept == NULL || kept[i]) {
            Version *version = &versions->items[versions->count++];
            version->frame = block->body + start;
            version->bytes = end - start;
            version->crc = (uint32_t)le(block->crcs + 4 * (size_t)i, 4);
            version->prev_seqno = le(block->prev_seqnos + 8 * (size_t)i, 8);
            version->seqno = block_seqno(block, i);
        }
        start = end;
    }
    return 1;
}

static uint8_t flags_of(const Version *versions, size_t count)
{
    int are_mutations = 1;
    uint8_t bits = 0;
    for (size_t i = 0; i < count; i++) {
        are_mutations &= versions[i].frame[1] == MUTATION;
        bits |= versions[i].frame[5];
    }
    return (are_mutations ? ONLY_MUTATIONS : 0) | (bits ? 0 : ONLY_RAW) |
           (bits & DATATYPE_SNAPPY ? PACKED : 0) | (bits & DATATYPE_XATTR ? XATTRS : 0);
}

/* Returns (key, value) of one block. */
static PyObject *one_block(const Version *versions, size_t count, size_t body_bytes,
                           uint32_t vb_id, uint32_t epoch, uint64_t seqno_before)
{
    uint64_t first = versions[0].seqno, last = versions[count - 1].seqno;
    int is_dense = last - first + 1 == count;
    size_t columns_bytes = count * (is_dense ? 16 : 24);
    PyObject *key = PyBytes_FromStringAndSize(NULL, BLOCK_KEY_BYTES);
    PyObject *value =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEADER_BYTES + columns_bytes + body_bytes));
    PyObject *pair = key != NULL && value != NULL ? PyTuple_Pack(2, key, value) : NULL;
    if (pair != NULL) {
        uint8_t *key_at = (uint8_t *)PyBytes_AS_STRING(key);
        uint8_t *at = (uint8_t *)PyBytes_AS_STRING(value);
        uint8_t *columns = at + HEADER_BYTES, *body = columns + columns_bytes;
        put_be(key_at, vb_id, 2);
        put_be(key_at + 2, first, 8);
        size_t end = 0;
        for (size_t i = 0; i < count; i++) {
            memcpy(body + end, versions[i].frame, versions[i].bytes);
            end += versions[i].bytes;
            put_le(columns + 4 * i, end, 4);
            put_le(columns + 4 * count + 4 * i, versions[i].crc, 4);
            put_le(columns + 8 * count + 8 * i, versions[i].prev_seqno, 8);
            if (!is_dense)
                put_le(columns + 16 * count + 8 * i, versions[i].seqno, 8);
        }
        at[0] = FORMAT;
        at[1] = flags_of(versions, count) | (is_dense ? 0 : HAS_SEQNOS);
        put_le(at + 2, 0, 2);
        put_le(at + 4, count, 4);
        put_le(at + 8, epoch, 4);
        put_le(at + 12, seqno_before, 8);
        put_le(at + 20, first, 8);
        put_le(at + 28, last, 8);
        put_le(at + 36, body_bytes, 4);
        put_le(at + 40, crc32c(0, body, body_bytes), 4);
        uint32_t crc = crc32c(0, key_at, BLOCK_KEY_BYTES);
        crc = crc32c(crc, at, CRC_AT);
        put_le(at + CRC_AT, crc32c(crc, columns, columns_bytes), 4);
    }
    Py_XDECREF(key);
    Py_XDECREF(value);
    return pair;
}

int blocks_build(PyObject *list, const Versions *versions, uint32_t vb_id, uint32_t epoch,
                 uint64_t seqno_before, size_t body_bytes_target)
{
    for (size_t first = 0; first < versions->count;) {
        size_t stop = first + 1, body_bytes = versions->items[first].bytes;
        while (stop < versions->count &&
               body_bytes + versions->items[stop].bytes <= body_bytes_target)
            body_bytes += versions->items[stop++].bytes;
        PyObject *pair = one_block(versions->items + first, stop - first, body_bytes, vb_id,
                                   epoch, seqno_before);
        int is_added = pair != NULL && PyList_Append(list, pair) == 0;
        Py_XDECREF(pair);
        if (!is_added)
            return 0;
        seqno_before = versions->items[stop - 1].seqno;
        first = stop;
    }
    return 1;
}
