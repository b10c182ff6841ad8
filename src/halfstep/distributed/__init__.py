"""Process groups, DistributedDataParallel, and averages over ranks."""
