"""Uploaded files and the outputs of batches: their bytes in a store of objects, a row for each in
SQL.

An object has the id of its row, never a name that a user gave. Gateways and tasks share both.
"""
