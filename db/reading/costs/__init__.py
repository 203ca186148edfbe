"""Where the time of jobs went.

`goodput` puts commits on one clock, `iteration_shares` divides iterations, `timeline` attributes every second, for
`job_timeline`, and `cost_accounts` adds up: all of them pure, as are `stored_accounts` and `summary`. `accounts` and
`fleet_costs` read the rows from a ledger.
"""
