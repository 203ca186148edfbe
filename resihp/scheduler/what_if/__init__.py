"""Planning without a job: this model, this hardware, these failures. Pure.

`question` makes a situation for the planner, with `catalogue` for models and hardware by name; `answer` compares the
decision with the state before; `losses` evaluates the possible next losses. Called by `resihp plan` and by benchmarks.
"""
