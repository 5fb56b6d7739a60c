"""Executes the plan of a step: inputs as tensors, the model's pass, sampling, on the chosen device.

Belongs here: runners, how they are built, warm-up. Which sequences are in a
step belongs to `scheduler`; what only one kind of device does belongs to `cpu` or `cuda`.
"""
