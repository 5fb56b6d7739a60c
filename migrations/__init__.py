"""Schema revisions of the database. `worker.record.migrate` runs them; README.md has the rules."""
