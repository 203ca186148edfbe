"""Choose plans: ask the scheduler and the checker, and determine the state from which a plan starts."""
