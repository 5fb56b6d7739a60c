"""Measuring tools that know no engine: workloads, figures, scores, tables, the machine's
disturbance.
"""
