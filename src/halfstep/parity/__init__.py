"""Trains at several levels in pairs with fp32, and tests whether they are as good."""
