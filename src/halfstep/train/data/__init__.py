"""Text files as examples, token ids and batches."""
