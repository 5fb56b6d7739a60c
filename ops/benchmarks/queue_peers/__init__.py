"""Workers and drivers of the queues that `ops/bench rates` puts beside ours."""
