"""Nodes that join, leave or replace others; measures against bad ones, and Slurm's view of them.

Never talks to Slurm: it orders actions and is notified of their results.
"""
