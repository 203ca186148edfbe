"""Optional calls for scripts that do not train with `resihp.Trainer`.

`resihp.checkpointed` names a checkpoint that a restart may resume from; `resihp.iteration` and `resihp.section` report
iterations and each rank's own work; `transformers` and `lightning` have callbacks that make these calls. Each call is
cheap, never waits, and does nothing if the script was not started by `resihp run`, so that the script also runs under
python and torchrun. Importing this package imports neither torch nor any part of the wrapper.
"""
