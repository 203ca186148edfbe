"""Commands for operators of a running job, over its supervisor's authenticated socket: stop it, have it write a
checkpoint, inject a fault."""
