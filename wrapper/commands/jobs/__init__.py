"""`resihp jobs`: list a user's jobs of all folders and hosts.

`listing` collects the rows, `tables` shows them on a terminal of any width, `command` is the command line.
"""
