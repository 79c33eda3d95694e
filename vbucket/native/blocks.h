/* Blocks of versions (vbucket/store/block.py says what they hold), read and made in C. */

#ifndef DCPD_BLOCKS_H
#define DCPD_BLOCKS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define BLOCK_KEY_BYTES 10
#define PREFIX_BYTES 12 /* of an entry: previous seqno and epoch, before the frame */
#define MUTATION 0x57
#define DELETION 0x58
#define EXPIRATION 0x59
#define SYSTEM_EVENT 0x5F

/* Big-endian numbers, as in entries, keys and records. */
static inline uint32_t be16(const uint8_t *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

static inline uint32_t be32(const uint8_t *at)
{
    return be16(at) << 16 | be16(at + 2);
}

static inline uint64_t be64(const uint8_t *at)
{
    return (uint64_t)be32(at) << 32 | be32(at + 4);
}

static inline void put_be(uint8_t *at, uint64_t number, int bytes)
{
    while (bytes--) {
        at[bytes] = (uint8_t)number;
        number >>= 8;
    }
}

/* Little-endian numbers, as in blocks. */
static inline uint64_t le(const uint8_t *at, int bytes)
{
    uint64_t number = 0;
    while (bytes--)
        number = number << 8 | at[bytes];
    return number;
}

static inline void put_le(uint8_t *at, uint64_t number, int bytes)
{
    for (int i = 0; i < bytes; i++, number >>= 8)
        at[i] = (uint8_t)number;
}

/* A block whose header and columns are checked. */
typedef struct {
    uint32_t vb_id, count, epoch, body_crc;
    uint64_t seqno_before, first_seqno, last_seqno;
    const uint8_t *ends, *crcs, *prev_seqnos, *seqnos, *body; /* seqnos: NULL without gaps */
    size_t body_bytes;
} Block;

/* A version on its way into a block. */
typedef struct {
    const uint8_t *frame;
    uint64_t seqno, prev_seqno;
    uint32_t bytes, crc;
} Version;

typedef struct {
    Version *items;
    size_t count, room;
} Versions;

/* Opens a block. Returns 0 if anything is wrong with its header or columns: also if its checksum is
   right, but a frame is too short, or the seqnos do not ascend from 1 or more. */
int block_open(Block *block, const uint8_t *key, size_t key_bytes, const uint8_t *value,
               size_t bytes);

/* Which frame is meant. */
typedef struct {
    uint64_t seqno, cas;
    const uint8_t *key;
    size_t key_bytes;
} FrameOf;

/* Returns a frame of a block that is not opened, and its length: `find_frame` of block.py. NULL: it
   is not there, or anything about it is wrong. */
const uint8_t *block_find_frame(const uint8_t *block_key, size_t block_key_bytes,
                                const uint8_t *value, size_t bytes, const FrameOf *of,
                                size_t *frame_bytes);

/* Whether the body is what was written. */
int block_body_is_sound(const Block *block);

static inline uint64_t block_seqno(const Block *block, uint32_t index)
{
    return block->seqnos ? le(block->seqnos + 8 * (size_t)index, 8) : block->first_seqno + index;
}

/* Makes room for `more` versions. Returns 0 with MemoryError set. */
int versions_reserve(Versions *versions, size_t more);

/* Adds what is kept of a block: a byte for each version, or NULL for all. Needs a sound body.
   Returns 0 with MemoryError set. */
int versions_add_block(Versions *versions, const Block *block, const uint8_t *kept);

/* Appends (key, value) of blocks of the target size to a list. Returns 0 with an exception. */
int blocks_build(PyObject *list, const Versions *versions, uint32_t vb_id, uint32_t epoch,
                 uint64_t seqno_before, size_t body_bytes_target);

#endif
