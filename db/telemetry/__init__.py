"""Reports of ranks on every iteration, on their way into the ledger: thinned and condensed; training never waits for
them."""
