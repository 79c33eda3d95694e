/* Entries of a master's commit group, read from bytes that may say anything. */

#ifndef DCPD_GROUP_ENTRY_H
#define DCPD_GROUP_ENTRY_H

#include <stddef.h>
#include <stdint.h>

#define ENTRY_BODY_AT 36   /* after its prefix and its frame's header */
#define ENTRY_EXPIRY_AT 56 /* of a mutation */

/* The head of an entry. */
typedef struct {
    const uint8_t *at;
    size_t bytes; /* of all of it */
    uint64_t prev_seqno, cas, seqno;
    uint32_t epoch, vb_id, body_bytes, key_bytes, extras_bytes;
    uint8_t opcode;
} Entry;

/* Reads the entry at `at`. Returns 0 if not all of it is there. */
int entry_read(Entry *entry, const uint8_t *at, size_t bytes);

/* Whether a replica at `high_seqno` may take an entry: its form, its seqnos, its CAS. */
int entry_follows(const Entry *entry, uint64_t high_seqno, uint64_t body_bytes_max);

#endif
