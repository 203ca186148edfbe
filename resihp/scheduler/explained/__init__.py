"""Why a plan takes as long as it does: what limits it, who stands by and why, how far it is from what any could do.

Never in the path of a recovery: `resihp plan` and the commands that read the ledger ask, the controller keeps facts.
"""
