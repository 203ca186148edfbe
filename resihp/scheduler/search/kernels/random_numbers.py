"""Random numbers of a search: equal seeds give equal sequences. Pure.

It never uses the generators of numba or numpy: their sequences may differ between versions. Called by `groups`, `moves`
and `trials`.
"""

from __future__ import annotations

from resihp.scheduler.search.kernels.arrays import Ints
from resihp.scheduler.search.kernels.compilation import machine_code


@machine_code
def random_share(drawn: Ints) -> float:
    """Return the next random number between 0 and 1 (L'Ecuyer, 1988: two generators combined)."""
    drawn[0] = 40014 * drawn[0] % 2147483563
    drawn[1] = 40692 * drawn[1] % 2147483399
    return float((drawn[0] - drawn[1]) % 2147483562 / 2147483562.0)


@machine_code
def random_index(n: int, drawn: Ints) -> int:
    return int(random_share(drawn) * n)
