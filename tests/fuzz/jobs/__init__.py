"""Fuzzes whole jobs against a real worker: values over every field, drawn by seed and number."""
