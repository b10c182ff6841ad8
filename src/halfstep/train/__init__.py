"""The program that fine-tunes a text model: config, data, model, loop, evaluation."""
