"""An HTTP server that speaks OpenAI's API in front of the queue: `tokenmill gateway`.

It has no state: each answer is a job, and what the API shows of a request travels with it. Any
number of gateways run side by side, and each may be killed at any moment.
"""
