"""Listeners of a running job besides its ledger: terminal, Prometheus, hooks, TensorBoard, OpenTelemetry.

`fanout` passes each journal record to all of them; `figures` computes the numbers that most of them show; `queue` runs
slow work in a thread; `deferred_ledger` is a ledger that a job does not wait for; `progress_file` keeps a job's
progress in a file of its folder. None of them can delay or end a job.
"""
