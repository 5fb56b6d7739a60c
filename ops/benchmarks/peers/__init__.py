"""Engines that `ops/bench engine` measures, each in a child process of its own."""
