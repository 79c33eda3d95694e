"""Deliberate faults in the product code, and what runs them: do the tests find each one?"""
