"""What `ops/demo` runs: the real parts, started small, and a view of what they do."""
