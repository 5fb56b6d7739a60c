"""Shows how an engine of your own joins a worker: `--engine ops.examples.engine`.

Belongs here: the least that the protocol of engines asks for, around a model of a few lines.
"""
