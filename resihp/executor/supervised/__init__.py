"""A worker under a supervisor: carries out orders, and reports progress and measurements.

`worker` is the training loop. `saving` writes the rank's part of checkpoints. `probe` measures devices and links.
`activities` sets the activity that heartbeats report. Imports torch.
"""
