"""The simulated machines, which are the ground truth: agents with connections, workers that train, park and die.

A `Worker` behaves as `resihp.protocol.client` and the trainer promise. Every choice that they leave open (when, in
which order, before or after) is drawn from the seed. Its assertions about orders are the conditions for a safe step.
Nothing here knows the controller: `resihp.simulator.world` carries its orders over.
"""
