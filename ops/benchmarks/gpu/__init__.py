"""Measurements of one GPU: ceilings of the device, gaps of a step, models, a peer, the report."""
