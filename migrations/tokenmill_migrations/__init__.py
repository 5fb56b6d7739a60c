"""Schema revisions of the database. `tokenmill_worker.record.migrate` runs them; README.md has the
rules.
"""
