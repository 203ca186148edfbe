"""Parsing of what Slurm's commands print. Pure: nothing here runs a command."""
