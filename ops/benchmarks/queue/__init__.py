"""Measurements of the queue: beside other queue systems, and the memory of a bulk run."""
