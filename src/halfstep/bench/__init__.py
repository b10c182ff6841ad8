"""Benchmarks: the same work at each level and with what people use instead."""
