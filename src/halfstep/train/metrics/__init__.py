"""How good a model's outputs are."""
