"""`resihp logs`: what a job's processes printed, from the job's folder."""
