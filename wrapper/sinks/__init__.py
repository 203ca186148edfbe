"""Who hears of a job while it runs, beside its ledger: terminal, Prometheus, hooks, TensorBoard, OpenTelemetry.

`fanout` gives each record of the journal to all of them, `figures` is what most of them show, `queue` a thread for what
may take long, `deferred_ledger` a ledger that a job does not wait for, `progress_file` how far the job is, for whoever
looks into its folder. None of them can delay or end a job.
"""
