"""The choice of a plan: the questions to the scheduler and to the checker, and the state that a plan starts from."""
