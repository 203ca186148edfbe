"""Cost accounts stored in the rows of jobs that are over: read, checked, and prepared for storing. Pure.

Decides whether a stored account can be used, because imported rows may have any content; never computes an account from
other rows. Called by `accounts`, `fleet_costs`, `job_timeline`, `summary` and `resihp history`.
"""

from __future__ import annotations

from collections.abc import Set

import msgspec

from resihp.db.reading.costs.cost_accounts import Account, RolledBack, Row
from resihp.db.reading.costs.timeline import (
    CAUSES,
    Again,
)

MAX_HELD_S = 1e9
"""Largest plausible time for which a job holds devices; imported rows may state any time."""


def stored_account(job: Row) -> Account | None:
    """Return the account stored in the row of a job that is over; None if the job is running, or if the account is
    missing, malformed or lacks causes."""
    account = stored_account_of_any_version(job)
    return account if account is not None and is_complete(account) else None


def is_complete(account: Account, but: Set[str] = frozenset()) -> bool:
    """Decide whether the account covers a plausible time, and has all causes except those in `but`."""
    causes = set(CAUSES) - but
    return 0.0 <= account.held_s <= MAX_HELD_S and all(
        losses.keys() >= causes for losses in (account.lost_s, account.lost_gpu_hours)
    )


def stored_account_with(job: Row, again: Again) -> Account | None:
    """Return the stored account, adjusted for `again`, the iterations that later attempts committed again; None if this
    adjustment is not stored, or was stored for other iterations."""
    account = stored_account(job)
    if account is None:
        return None
    before, account = rolled_back(account, again), msgspec.structs.replace(account, rolled_back=None)
    if before is None:
        return None if again else account
    lost_s = account.lost_s | {"rollback": account.lost_s["rollback"] + before.seconds}
    hours = account.lost_gpu_hours | {"rollback": account.lost_gpu_hours["rollback"] + before.gpu_hours}
    return msgspec.structs.replace(
        account,
        useful_s=account.useful_s - before.seconds,
        lost_s=lost_s,
        useful_gpu_hours=account.useful_gpu_hours - before.gpu_hours,
        lost_gpu_hours=hours,
    )


def rolled_back(account: Account, again: Again) -> RolledBack | None:
    """Return the stored rollback for the iterations `again`; None if there is none, or if it exceeds the useful
    time."""
    rolled = account.rolled_back
    if rolled is None or not again or rolled.again != tuple(again):
        return None
    return rolled if _fits_within(account, rolled) else None


def _fits_within(account: Account, rolled: RolledBack) -> bool:
    return 0.0 <= rolled.seconds <= account.useful_s and 0.0 <= rolled.gpu_hours <= account.useful_gpu_hours


def is_malformed(job: Row) -> bool:
    """Decide whether the stored account of a job that is over is malformed or implausible. It is then ignored, and
    computed from the rows. Accounts of older versions are not malformed."""
    if job["state"] == "running" or not job.get("account"):
        return False
    account = stored_account_of_any_version(job)
    if account is None or not 0.0 <= account.held_s <= MAX_HELD_S:
        return True
    rolled = account.rolled_back
    return rolled is not None and not _fits_within(account, rolled)


def account_to_store(alone: Account, whole: Account, again: Again) -> Account:
    """Return the account to store for a job that is over: `alone`, computed without later attempts, plus the rollback
    in `whole`, which was computed with them."""
    if not again:
        return msgspec.structs.replace(alone, rolled_back=None)
    rolled = RolledBack(
        again=tuple(again),
        seconds=min(max(whole.lost_s["rollback"], 0.0), alone.useful_s),
        gpu_hours=min(max(whole.lost_gpu_hours["rollback"], 0.0), alone.useful_gpu_hours),
    )
    return msgspec.structs.replace(alone, rolled_back=rolled)


def stored_account_of_any_version(job: Row) -> Account | None:
    """Return the stored account in any format, including those of versions with fewer causes, or only for the wall
    time; None if there is none, or if it is malformed."""
    if job["state"] == "running" or not job.get("account"):
        return None
    try:
        return msgspec.json.decode(job["account"], type=Account)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
