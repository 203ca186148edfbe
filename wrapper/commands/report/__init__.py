"""`resihp report`: one page, or a short text for a ticket, of what happened to a job. Decides nothing.

`facts` reads rows, `story` turns them into sentences and figures, `timeline`, `times` and `layouts` into pictures,
`page` and `markdown` into what is written; `command` is the command line. Everything quoted from the ledger is escaped.
"""
