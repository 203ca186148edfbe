"""What a run was asked to be: options, environment and files as one typed tree, and the run's own file.

=========================  ====================================================================================
`schema`, `values`         every key, and what may stand in it
`run_spec`                 what `resihp run` writes down for supervisor and agents
`program`, `container`     what the user's command is, and how a program of ours starts inside a container
`shape`                    which nodes a run has, and whether its layout can be
=========================  ====================================================================================

Refuses in words what cannot be; starts nothing.
"""
