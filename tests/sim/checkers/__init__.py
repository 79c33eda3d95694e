"""Rules over the facts of a run. Pure: facts in, violations out, in words.

Each checker is a function of facts that returns one line for each violation. Each has tests with
good and bad facts written by hand.
"""
