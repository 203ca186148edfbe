"""`resihp plan`: show the plan for given failures, and its cost. Nothing is started.

`command` is the command line, `of_job` builds the question from a job's ledger, `tables` and `hurts` show answers,
`picture` draws pipelines before and after; `resihp.scheduler.what_if` computes the answer.
"""
