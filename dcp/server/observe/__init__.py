"""What every part reports to: counters, the event log, rate limits of lines, supervised tasks."""
