"""A worker under a supervisor: it follows orders, and reports what it did and measured.

`worker` is the training loop; `saving` writes the rank's part of checkpoints; `probe` measures devices and links;
`activities` are what the rank reports that it is doing. Imports torch.
"""
