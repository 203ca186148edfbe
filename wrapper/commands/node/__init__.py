"""`resihp node`: nodes drained, excluded and repaired by hand, and what is known of them.

`command` is the drain ladder, `maintenance` what was repaired.
"""
