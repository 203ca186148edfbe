"""Sequential statistics, one value at a time: when a level changed, by how much, how sure. Pure, no clock.

`changes` watches one series, `peer_cusum` many against each other over a `window`, both with what `noise` and
`densities` know of how they vary. Knows nothing of ranks or training. Called by `detector.online` and
`detector.offline`.
"""
