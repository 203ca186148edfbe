"""Per-rank reports of every iteration on their way into the ledger: thinned, condensed, and never waited for."""
