"""What is wrong with a model, a step or a run: observed, never acted on."""
