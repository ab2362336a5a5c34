"""Runs the examples of README.md and docs/ as a reader would."""
