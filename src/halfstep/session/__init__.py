"""Sessions: train a prepared model with its optimizer, save and resume."""
