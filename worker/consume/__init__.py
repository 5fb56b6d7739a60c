"""From the queue into the worker: claiming, leases, control, and the writes that a lease allows."""
