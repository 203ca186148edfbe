"""What the controller holds beside the record of its job: all that a take-over may forget.

Beats and answers, who is waited for, what is suspected or under way, times of the controller's clock. Durable truth is
`Job.record` (`resihp.record.state`): handlers read it, and change it by `Job.log` alone. `job` has it all together; the
other modules have its parts, plain data with small, local rules. The decisions are in the modules around this package.
"""
