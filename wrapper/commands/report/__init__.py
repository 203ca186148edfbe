"""`resihp report`: the history of a job as one page, or as a short text for a ticket. Decides nothing.

`facts` reads rows, `story` turns them into sentences and figures, `timeline`, `times` and `layouts` into pictures,
`page` and `markdown` write the result; `command` is the command line. All text from the ledger is escaped.
"""
