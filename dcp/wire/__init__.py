"""The wire format: bytes in, frames out; frames in, bytes out. Pure; both peers use it."""
