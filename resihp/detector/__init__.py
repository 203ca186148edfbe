"""Detects slow and dead devices and links: which one, since when, with which certainty, and why.

======================  =======================================================================================
`observation`           measurements of one iteration
`findings`              results for one iteration: a rank, a link or the job became slow, or recovered
`probes`, `suspects`    verdicts on probes of devices and links, by comparison with peers and with the past
`lemons`, `excess`      nodes and devices that fail repeatedly; counts that are higher than chance allows
`service_hours`         hours that nodes and devices were in service
`moved`                 records of devices that moved to another node or were repaired
`online`                fail-slow detection while a job runs: the controller asks it after each iteration
`sequential`            the statistics of `online`: change points, noise, one series against its peers
`rivals`                the detection methods of other papers, for comparison
`diagnosis`             why a process ended
`offline`               analysis of files from jobs that ran without resihp, for `resihp analyze`
======================  =======================================================================================

The detector only reports; the controller and the scheduler decide on the reaction. All of it is pure: no clock, no
socket, no torch.
"""
