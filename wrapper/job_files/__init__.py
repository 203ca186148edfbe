"""A job's folder: its files, its lock, and its entry in the user's registry.

The folder is `<RESIHP_HOME, default ./.resihp>/jobs/<job>/`, and only its owner can read it:

    job.json          name, host, journal, ledger                key              32 random bytes
    run.json          the request (`resihp.wrapper.config.run_spec`)    supervisor.json  address and pid, while it runs
    supervisor.lock   held by the guardian                       logs/            one file for each process
    journal           a copy, made when the job has ended        checkpoints/     unless configured elsewhere
    progress.json     the job's progress, while it runs

The journal itself is on local disk, `<RESIHP_LOCAL, default /var/tmp/resihp-<uid>>/<job>-<digest of the folder>/`. Two
types make it safe to look at any job. A `Job` may belong to any user: its files are not trusted, so no file outside of
its folder is opened because a file in the folder names it, and nothing is written. An `OurJob`, with all folders up to
the home, can be written only by us or root (`resihp.wrapper.strict_modes`): the paths of its journal and its ledger are
taken from job.json.

`contents` defines the fields of the files, `job` the two types. `journals` chooses the journal, `registered` writes the
entry in the registry, `homes` names the home, and `dead_jobs` ends a job after its supervisor's death.
"""
