"""The one place that talks to Slurm: what can be asked (`client`), the real one (`commands`), and what it prints.

=============================  ================================================================================
`command_call`                 one call of one command: no shell, ended in time, output of bounded size
`parse`, `releases`            what is printed, and how releases differ
`rate_limited`                 one door for a whole job, so that the site's controller is asked rarely
`survey`, `limits`             what a cluster is like, asked once
`render`                       batch scripts
`replacement`                  a node in place of a lost one
`drains`                       the drain ladder; `site`: the hook that root runs
=============================  ================================================================================

Knows nothing of training, of the wrapper or of the ledger.
"""
