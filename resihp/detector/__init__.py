"""Is a device or link slow or dead, where, since when, how sure, and why. Pure: no clock, no socket, no torch.

=============================  ===============================================================================
`observation`                  what was measured of an iteration
`predictor`, `regression`      how long a micro-batch takes where all is well (the paper's Eq. 1), learnt robustly
`changes`, `densities`         change points of a series of residuals
`monitor`, `findings`          what the controller asks after each iteration: predicted time, findings
`whole`, `ranks`, `links`      the monitor's channels: iteration, which rank, which link; `stacked`: a plan as arrays
`relative`, `noise`, `window`  the sequential test behind ranks and links: each against its peers
`probes`                       what measurements of devices and links say, against peers and the past
`diagnosis`, `reports`         why a process ended, from its exit and from `clues` in what was logged
`clues`, `signatures`, `xids`  the lines that tell it
`health`                       which nodes fail again and again
`series`, `peers`, `runs`      detection where only iteration times are known; `logs` reads them
`operations`, `traces`         per-operation traces: detection, and `what_if`, without stragglers
`analysis`                     what `resihp analyze` answers
=============================  ===============================================================================
"""
