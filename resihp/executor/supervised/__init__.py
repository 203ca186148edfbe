"""A worker under a supervisor: it follows orders, and reports what it did and measured.

`worker` is the training loop; `saving` writes the rank's part of checkpoints; `activities` tell the supervisor what the
rank is doing. Imports torch.
"""
