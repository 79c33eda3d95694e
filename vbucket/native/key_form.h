/* How a client names documents, and what it wants to hear: what its connection negotiated. */

#ifndef DCPD_KEY_FORM_H
#define DCPD_KEY_FORM_H

#include "blocks.h"

#include <string.h>

enum {
    UNPREFIXED = 1, /* keys come without the byte of the default collection */
    HASHED = 2,     /* the partition follows from the key, whatever the header says */
    TOKENS = 4,     /* answers of changes have mutation tokens */
    UNMARKED = 8    /* answers have no marks: quiet changes are taken, and refusals given */
};

#define VBUCKET_BITS 0x7FFF
#define CRC32_REVERSED 0xEDB88320u

/* CRC-32 (zlib's). Called with the interpreter's lock. */
static inline uint32_t crc32_of(const uint8_t *at, size_t bytes)
{
    static uint32_t table[256];
    if (!table[1])
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t crc = byte;
            for (int bit = 0; bit < 8; bit++)
                crc = crc >> 1 ^ (crc & 1 ? CRC32_REVERSED : 0);
            table[byte] = crc;
        }
    uint32_t crc = UINT32_MAX;
    while (bytes--)
        crc = crc >> 8 ^ table[(crc ^ *at++) & 0xFF];
    return ~crc;
}

/* The partition of a key without prefix: see vbucket/model/ids.py. */
static inline uint32_t vbucket_of(const uint8_t *key, size_t bytes, uint32_t partitions)
{
    return (crc32_of(key, bytes) >> 16 & VBUCKET_BITS) % partitions;
}

/* Writes a stored key: `bytes` of them, the prefix included. */
static inline void key_write(uint8_t *to, const uint8_t *wire_key, size_t bytes, unsigned form)
{
    *to = 0;
    memcpy(to + (form & UNPREFIXED), wire_key, bytes - (form & UNPREFIXED));
}

#endif
