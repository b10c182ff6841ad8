"""Reads text files, tokenizes their examples, and forms batches."""
