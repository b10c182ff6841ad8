"""Where an inf or a NaN came from, as a value."""
