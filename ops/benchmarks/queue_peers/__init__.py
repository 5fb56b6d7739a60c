"""Workers and drivers of the queues that `ops/bench queue` puts beside ours."""
