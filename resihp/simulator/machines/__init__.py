"""The simulated machines, which are the ground truth: agents with connections, workers that train, park and die.

A `Worker` behaves as `resihp.protocol.client` and the trainer promise. The seed determines everything that these
promises leave open (when, in which order, before or after). The assertions of a worker about its orders are the
conditions for a safe step. No module here knows the controller: `resihp.simulator.world` transmits its orders.
"""
