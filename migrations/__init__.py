"""The database's revisions. `worker.record.migrate` runs them; see README.md for the rules of a change."""
