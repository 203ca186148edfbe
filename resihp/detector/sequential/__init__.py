"""Sequential statistics, one value at a time: when a level changed, by how much, how sure. Pure, no clock.

`changes` watches one series and its `levels`, `peer_cusum` many against each other over a `window`; both use the models
of variation in `noise` and `densities`. Knows nothing of ranks or training. Called by `detector.online` and
`detector.offline`.
"""
