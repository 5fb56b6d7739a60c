"""Simulations in virtual time, with the real scheduler on a cost model; and what a queue server
carries, counted.

No device is needed, and nothing waits.
"""
