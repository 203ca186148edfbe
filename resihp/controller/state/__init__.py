"""The controller's volatile state: everything that it knows beside the job's record and may lose in a take-over.

It consists of heartbeats, pending answers, ranks that are awaited, open suspicions, work in progress, and times of the
controller's clock. Durable state is in `Job.record` (`resihp.record.state`): handlers read it, and change it only by
`Job.log`. `job` combines all of this in one class; the other modules define its parts as plain data with small, local
rules. Decisions are made in the modules around this package, never here.
"""
