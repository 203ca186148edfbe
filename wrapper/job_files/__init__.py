"""A job's folder: its files, its lock, and its entry in the user's registry.

It is `<RESIHP_HOME, default ./.resihp>/jobs/<job>/`, readable by its owner alone:

    job.json          name, host, journal, ledger                key              32 random bytes
    run.json          the request (`wrapper.config.run_spec`)    supervisor.json  address and pid, while it runs
    supervisor.lock   held by the guardian                       logs/            one file for each process
    journal           a copy, made when the job has ended        checkpoints/     unless configured elsewhere
    progress.json     the job's progress, while it runs

The journal itself is on local disk, `<RESIHP_LOCAL, default /var/tmp/resihp-<uid>>/<job>-<digest of the folder>/`. Two
types make it safe to look at any job. A `Job` may belong to anybody: its files are not trusted, so no file outside of
its folder is opened because a file in it names it, and nothing is written. An `OurJob` is ours, or root's, up to the
home (`wrapper.strict_modes`): its journal and its ledger are where job.json says.

`contents` has the fields of the files, `job` the two types, `journals` chooses the journal, `registered` writes the
entry in the registry, `homes` names the home, and `dead_jobs` ends a job after its supervisor's death.
"""
