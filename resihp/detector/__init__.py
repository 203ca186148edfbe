"""Detects slow and dead devices and links: which, where, since when, how sure, and why. Pure: no clock, socket, torch.

======================  =======================================================================================
`observation`           measurements of one iteration
`findings`              statements about one iteration: something became slow, or recovered
`probes`                probe results of devices and links, compared with peers and with the past
`lemons`, `excess`      nodes and devices that fail repeatedly; counts that are higher than chance allows
`service_hours`         hours that nodes and devices served
`online`                fail-slow detection while a job runs: the controller asks it after each iteration
`sequential`            the statistics behind it: change points, noise, one series against its peers
`diagnosis`             why a process ended
`offline`               analysis of files from jobs that ran without resihp, for `resihp analyze`
======================  =======================================================================================

The detector states facts; the controller and the scheduler decide on the reaction.
"""
