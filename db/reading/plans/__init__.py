"""Plans: why each takes as long as it does, what it promised and kept, and its alternatives."""
