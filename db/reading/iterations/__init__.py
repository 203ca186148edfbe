"""Of one iteration: what it should have taken, and why it took longer. Pure; reads nothing."""
