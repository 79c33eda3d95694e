"""One DCP connection as a client sees it: bytes in, events out, no sockets and no clock.

Consumers, backups and Spark tasks share it. It opens the connection, asks for streams, reads each
answer and each stream end by one table, answers NOOPs, acknowledges bytes, and remembers which
streams wait for another attempt. Decoding changes is up to each user.

    clients.streaming.verdict       what a status or an end reason means
    clients.streaming.outcome       the events
    clients.streaming.stream_connection    the connection
    clients.streaming.rollback_rounds      one round of going back
"""
