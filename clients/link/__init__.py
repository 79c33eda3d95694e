"""Connections to nodes, and where to find them: what all clients share below their own commands.

handshake         login, HELLO, the bucket; sans-IO
topology          the cluster's map
first_answer      any of several nodes, shortly after each other
dials             attempts at several nodes, with pauses
pipelined_link    a connection over asyncio
blocking_link     a connection over a blocking socket
"""
