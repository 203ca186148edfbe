"""Sequential statistics: find changes of level in series of values, with onset, size and confidence. Pure, no clock.

`changes` tests one series (with `levels` and `densities`), `peer_cusum` many series against each other (with `window`,
`noise` and `drift`), and `flicker` series that are slow now and then. `run_lengths` serves the rival detectors. This
package knows nothing of ranks or training. Called by `detector.online`, `detector.rivals` and `detector.offline`.
"""
