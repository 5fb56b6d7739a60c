"""Workers and drivers of the queues that `ops/bench queue` compares with ours."""
