"""Nodes that join, leave and come in place of others; what is done about bad ones, and what Slurm sees of them.

Never talks to Slurm: it asks for what is to be done, and is told what came of it.
"""
