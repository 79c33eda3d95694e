/* See group_entry.h. Who calls it: group_run.c. Rules: failover/replication/messages.py. */

#include "group_entry.h"

#include "blocks.h"
#include "set_request.h"

#define SEQNO_END (SEQNO_AT + 8)

int entry_read(Entry *entry, const uint8_t *at, size_t bytes)
{
    if (bytes < SEQNO_END || be32(at + 20) > bytes - ENTRY_BODY_AT)
        return 0;
    *entry = (Entry){
        .at = at,
        .bytes = ENTRY_BODY_AT + (size_t)be32(at + 20),
        .prev_seqno = be64(at),
        .cas = be64(at + 28),
        .seqno = be64(at + SEQNO_AT),
        .epoch = be32(at + 8),
        .vb_id = be16(at + 18),
        .body_bytes = be32(at + 20),
        .key_bytes = be16(at + 14),
        .extras_bytes = at[16],
        .opcode = at[OPCODE_AT],
    };
    return 1;
}

/* The length of a change's extras; no entry has UINT32_MAX. */
static uint32_t extras_of(uint8_t opcode)
{
    switch (opcode) {
    case MUTATION:
        return 31;
    case DELETION:
        return 18;
    case EXPIRATION:
        return 20;
    case SYSTEM_EVENT:
        return 13;
    default:
        return UINT32_MAX;
    }
}

int entry_follows(const Entry *entry, uint64_t high_seqno, uint64_t body_bytes_max)
{
    return entry->seqno == high_seqno + 1 && entry->prev_seqno < entry->seqno &&
           entry->extras_bytes == extras_of(entry->opcode) && entry->key_bytes &&
           entry->body_bytes >= entry->extras_bytes + entry->key_bytes &&
           entry->body_bytes <= body_bytes_max && (entry->cas || entry->opcode == SYSTEM_EVENT);
}
