"""Simulated jobs: `scenario` defines their data, and each other module draws one family of jobs from a seed.

A seed always gives the same job. These modules never play a job: `resihp.simulator.world` does. Called by tests and
`harness`.
"""
