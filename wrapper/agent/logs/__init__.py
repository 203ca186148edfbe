"""The logs of a node's processes: `log_mirror` copies them to the job's folder; `script_output` reads the iterations
that a script prints."""
