"""A prepared model and its optimizer: one step after another, saved and resumed."""
