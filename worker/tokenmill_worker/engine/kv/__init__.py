"""The KV cache: bookkeeping in plain Python, and the device and host pools that hold the bytes."""
