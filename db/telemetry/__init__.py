"""What ranks report of every iteration, on its way into the ledger: thinned, condensed, never waited for."""
