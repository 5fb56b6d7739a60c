"""Planning past one machine: what a queue server carries, counted. No device is needed."""
