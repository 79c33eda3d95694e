"""The log: records of commit groups, in segments, on a device (files, or memory for tests)."""
