"""Process groups, DistributedDataParallel, and means over all ranks."""
