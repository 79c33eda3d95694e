"""What all parts report to: counters, the event log, rate limits of log lines, supervised tasks."""
