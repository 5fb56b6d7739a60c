"""Virtual time: the real scheduler on a cost model, and a model of the queue layer. No device, no waiting."""
