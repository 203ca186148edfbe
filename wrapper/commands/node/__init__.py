"""`resihp node`: drain, exclude and repair nodes by hand, and show their health.

`command` is the drain ladder, `maintenance` records repairs.
"""
