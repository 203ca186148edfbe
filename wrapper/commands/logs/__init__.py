"""`resihp logs`: print the logs of a job's processes, from the job's folder."""
