"""Tuning a job again by its own measured times."""
