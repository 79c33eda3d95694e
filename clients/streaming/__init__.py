"""The client side of a DCP connection: bytes in, events out, without sockets and clock.

Consumers, backups and Spark tasks share it. It opens the connection, requests streams, interprets
answers and stream ends, answers NOOPs, acknowledges bytes, and tracks the streams that wait for a
retry. Its users decode the changes.

    verdict              what a status or an end reason means
    outcome              the events
    stream_connection    the connection, its pending requests, and its buffer of bytes
    cursor               where a client is in a partition, and what a ROLLBACK does
"""
