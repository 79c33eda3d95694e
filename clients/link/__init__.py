"""Connections to nodes, and where to find them: what all clients share below their own commands.

handshake         login, HELLO, the bucket; sans-IO
topology          the cluster's map: which node, whom to ask, when to try again; sans-IO
pipelined_link    a connection over asyncio, to one node or to the first of several
blocking_link     the same over a blocking socket
dials             attempts at several nodes over asyncio
"""
