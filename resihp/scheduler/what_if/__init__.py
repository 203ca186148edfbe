"""Planning without a job: this model, this hardware, these failures. Pure.

`option_texts` reads the parts of a question; `question` makes a situation for the planner of it, with `catalogue` for
models and hardware by name; `answer` compares the decision with the state before; `losses` evaluates the
possible next losses. Called by `resihp plan` and by benchmarks.
"""
