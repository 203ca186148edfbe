"""Of plans: why each takes as long as it does, what it promised and kept, what else was possible."""
