"""Planning past one machine: the real scheduler in virtual time on a cost model, and what a queue
server carries, counted.

No device is needed, and nothing waits.
"""
