"""The agent: one process a node, that starts workers, passes messages on, and tells at once who ended.

It follows whoever leads (`supervisor_link`), holds a copy of the journal (`journal_copy`), and where nobody leads any
more has a successor elected and started (`election`, `peers`, `successor`). Decides nothing about training. Started by
`wrapper.launch`; only `process` is anybody else's business.
"""
