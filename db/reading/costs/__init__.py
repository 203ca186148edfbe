"""How the time of jobs was spent.

`goodput` puts commits on one clock. `iteration_shares` divides iterations into shares. `timeline` attributes every
second, and `job_timeline` does so for a job. `cost_accounts` adds up. All of these are pure, as are `stored_accounts`
and `summary`. `accounts` and `fleet_costs` read the rows from a ledger.
"""
