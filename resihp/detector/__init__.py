"""Is a device or link slow or dead, where, since when, how sure, and why. Pure: no clock, no socket, no torch.

======================  =======================================================================================
`observation`           what was measured of an iteration
`findings`              what is said of it
`probes`                what measurements of devices and links say, against peers and the past
`lemons`, `excess`      which nodes and devices fail again and again; which counts are more than chance
`online`                fail-slow while a job runs: what the controller asks after each iteration
`sequential`            the statistics behind it: change points, noise, one series against its peers
`diagnosis`             why a process ended
`offline`               what `resihp analyze` answers of files from jobs that ran without us
======================  =======================================================================================

Says what is; what follows from it is the controller's and the scheduler's to decide.
"""
