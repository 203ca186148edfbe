"""Where the time of a job went. Pure; reads nothing.

`goodput` puts commits on one clock, `timeline` attributes every second, `cost_accounts` adds up.
"""
