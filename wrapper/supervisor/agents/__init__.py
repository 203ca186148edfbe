"""The supervisor's connections to its agents.

`links` keeps all of them and turns what comes in into events; `link` is one. `starts` makes the messages that start
workers, `rendezvous` tells workers where to meet, `roster` tells agents of each other, and `departure` ends them all.
"""
