"""Plans: explanations of their iteration times, promised and measured gains, decisions, and alternatives."""
