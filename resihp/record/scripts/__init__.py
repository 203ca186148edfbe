"""The durable state of restarts: journal entries, the checkpoints of a script that does not declare a model, and the
rollbacks of one that trains with resihp.Trainer."""
