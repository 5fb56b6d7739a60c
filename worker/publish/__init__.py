"""The engine's events become chunks of text in the job's log and on its channel."""
