"""The supervisor's work on checkpoint files: it commits those of `resihp.Trainer`, and finds those of other scripts."""
