"""The commands of `ops/bench`, one module each: what a benchmark runs and prints."""
