"""What an agent can say of workers that make no progress."""
