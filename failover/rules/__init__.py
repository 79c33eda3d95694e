"""The rules of failover as pure functions: versions, rollback, in-sync sets, elections, fencing.

They import nothing but ids, so everyone may import them; the model checker searches them.
"""
