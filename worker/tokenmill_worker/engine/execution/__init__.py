"""Executes the plan of a step: inputs as tensors, the model's pass, sampling, on the chosen device.

Belongs here: runners, their memory, warm-up, tensor parallelism. Which sequence is in a step belongs to `scheduler`.
"""
