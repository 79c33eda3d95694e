"""Failover logs and the rule that answers a stream request with OK or ROLLBACK."""
