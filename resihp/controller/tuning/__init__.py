"""Tune a job's plan to its own measured times."""
