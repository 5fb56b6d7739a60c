"""The commands of `ops/bench`, one module each.

Belongs here: what a benchmark runs and prints. Measuring tools belong to `measure`, `compare` and
`gpu`.
"""
