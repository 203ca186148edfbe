"""`resihp jobs`: a user's jobs, of all folders and hosts.

`listing` puts the rows together, `tables` shows them on a terminal of any width, `command` is the command line.
"""
