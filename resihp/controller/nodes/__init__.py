"""Handle nodes that join, leave or replace others, measures against bad nodes, and Slurm's view of nodes.

Never talks to Slurm: this package orders actions, and events report their results.
"""
