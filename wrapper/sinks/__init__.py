"""Listeners of a running job besides its ledger: terminal, Prometheus, hooks, TensorBoard, OpenTelemetry.

`fanout` passes each journal record to all listeners. `figures` computes the numbers that most listeners show. `queue`
runs slow work in a thread. `deferred_ledger` is a ledger that opens in the background, while the job already runs.
`progress_file` keeps a job's progress in a file in the job's folder. No listener can delay or end a job.
"""
