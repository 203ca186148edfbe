"""Planning without a job: a given model, hardware and failures. Pure.

`option_texts` parses the parts of a question. `question` builds the planner's situation from a question, and
`catalogue` supplies models and hardware by name. `answer` compares the decision with the state before the failures.
`losses` evaluates the possible next losses. Called by `resihp plan` and by benchmarks.
"""
