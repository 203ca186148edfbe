"""The supervisor's connections to its agents.

`links` keeps all connections and turns incoming messages into events; `link` is the connection to one agent. `starts`
makes the messages that start workers, `rendezvous` exchanges messages between ranks that build communicators, `roster`
sends agents the list of all agents, and `departure` ends all agents.
"""
