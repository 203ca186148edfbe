"""`resihp plan`: what would be done for given failures, and what it would come to. Nothing is started.

`command` is the command line, `of_job` asks for a job that ran, `tables` and `hurts` show answers, `picture` draws
pipelines before and after; the answer itself is made by `resihp.scheduler.what_if`.
"""
