"""Compares engines over alternating rounds, keeps the results, and reports medians and ratios."""
