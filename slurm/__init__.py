"""All communication with Slurm: the interface (`client`), its implementation (`commands`) and the parser (`parse`).

=============================  ================================================================================
`command_call`                 one call of one command: no shell, a time limit, output of bounded size
`parse`, `releases`            parsing of command output, and differences between Slurm releases
`rate_limited`                 one shared client for each job, so that the site's controller gets few requests
`survey`, `limits`             settings, partitions and limits of a cluster, before there is a job
`render`                       batch scripts
`replacement`                  jobs that replace a lost node
`drains`                       the drain ladder; `site`: the hook that root runs
=============================  ================================================================================

This package does not depend on training, on the wrapper or on the ledger.
"""
