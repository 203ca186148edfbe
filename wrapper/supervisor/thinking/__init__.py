"""Planning ahead: a separate process beside the supervisor answers planning questions that are not urgent."""
