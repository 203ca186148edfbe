"""Commands for operators of a running job: stop the job, have it write a checkpoint, inject a fault. They use the
supervisor's authenticated socket."""
