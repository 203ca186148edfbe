"""All contact with Slurm: the client protocol (`client`), its implementation (`commands`) and the parser (`parse`).

=============================  ================================================================================
`command_call`                 one call of one command: no shell, a time limit, output of bounded size
`parse`, `releases`            parsing of command output, and differences between Slurm releases
`rate_limited`                 one shared client per job, so that the site's controller is asked rarely
`survey`, `limits`             settings, partitions and limits of a cluster, asked once
`render`                       batch scripts
`replacement`                  jobs that replace a lost node
`drains`                       the drain ladder; `site`: the hook that root runs
=============================  ================================================================================

Knows nothing of training, of the wrapper or of the ledger.
"""
