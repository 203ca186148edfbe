"""A tuned job, tuned again by the times that it shows itself."""
