"""Float formats, nested tensors, norms, and tensor statistics."""
