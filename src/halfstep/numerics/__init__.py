"""Float formats, trees of tensors, norms, and statistics of numbers."""
