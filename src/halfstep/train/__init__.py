"""The fine-tuning program for text models: config, data, model, loop, evaluation."""
