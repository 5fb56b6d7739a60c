"""Simulations in virtual time: the real scheduler on a cost model, and a model of the queue.

No device is needed, and nothing waits.
"""
