"""The conformance kit: it judges servers of DCP by the public documents, consumers by scenarios.

An outline, bottom up:

packet      packets of the binary protocol, the kit's own reading of it      pure
snapshots   what a stream's messages have to obey                            pure
wire        one connection: sends, expects, records; every wait has an end   shell
check       what a check is, and how it is made                              shell
checks      the checks, one for a sentence of the documents
report      what came of them: text, JSON, JUnit                             pure
consumers   scenarios that a real server plays for a consumer, and judges
"""
