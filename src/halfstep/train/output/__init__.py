"""Files and console output of a run."""
