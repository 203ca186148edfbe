"""State that the controller holds beside the record of its job: all of it may be forgotten in a take-over.

It consists of heartbeats and answers, of ranks that are waited for, of suspicions and work under way, and of times of
the controller's clock. Durable truth is `Job.record` (`resihp.record.state`): handlers read it, and change it only by
`Job.log`. `job` has it all together; the other modules have its parts, plain data with small, local rules. The
decisions are in the modules around this package.
"""
