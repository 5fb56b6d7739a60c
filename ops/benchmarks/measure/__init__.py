"""Measuring tools: workloads, rounds, figures, tables, and the floor of a step."""
