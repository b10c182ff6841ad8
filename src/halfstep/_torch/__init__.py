"""Uses of torch's private API, one per file, and patches of torch."""
