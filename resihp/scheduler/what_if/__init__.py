"""Questions that somebody asks without a job: this model, this hardware, these failures. Pure.

`question` makes a situation for the planner, with `catalogue` for models and hardware by name; `answer` puts the
decision beside what was before; `losses` asks what the next loss would come to. Called by `resihp plan` and by
benchmarks.
"""
