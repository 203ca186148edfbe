"""Configuration of a run: options, environment and files as one typed tree, and the file that describes one run.

=========================  ====================================================================================
`schema`, `values`         every key, and its valid values
`sources`                  the files, the environment and the options that set keys, and which of them wins
`run_spec`                 the request that `resihp run` writes for supervisor and agents
`torchrun_options`         the options of torchrun that `resihp run` takes
`program`, `launchers`     the user's command, and commands that are launchers themselves
`container`                how a program of ours starts inside a container
`shape`                    the nodes of a run, and whether its layout is possible
=========================  ====================================================================================

Rejects an impossible request with an error that explains it; starts nothing.
"""
