"""`resihp submit`: from a job file to a batch script and on to sbatch; and what a batch script says of itself.

`command` is the command line, `batch_script` reads a script's directives, `chain` tells jobs that wait behind a broken
one.
"""
