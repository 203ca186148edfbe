"""Injected faults: parse and format `KIND:TARGET[,key=value...]@WHEN`, the value of `resihp run --fault`. Pure."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from resihp.errors import ConfigurationError

Kind = Literal["kill", "crash", "stop", "hang", "raise", "disconnect", "slow"]
"""Kind of a fault. `disconnect` closes the supervisor's connection to a node's agent once. `slow` persists for several
iterations."""

Phase = Literal["forward", "backward", "reduce", "step", "park", "groups", "transfer", "resume"]
"""Phase in which a fault fires. `forward`, `backward`, `reduce` and `step` belong to an iteration; `park`, `groups`,
`transfer` and `resume` belong to the transition to a new plan before that iteration, if there is one."""

LINK_MS = "RESIHP_EMULATED_LINK_MS"
"""Environment variable: emulated milliseconds of one transfer over a healthy link between two nodes
(`resihp.executor.emulation`)."""

LINKS_NEED_TIMES = (
    "the duration of a transfer over a healthy link must be emulated as well; start the job with that time in "
    f"milliseconds, for example {LINK_MS}=20 resihp run ..."
)
"""Error text for a fault that slows a link while link times are not emulated."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One injected fault. It fires once, when its target enters `phase` of `iteration`.

    If the target is on standby, the fault fires when the first rank enters that phase. Exactly one of `rank`, `node`
    and `link` is set. `iteration` is None if an operator asked for the fault immediately.
    """

    id: int
    kind: Kind
    rank: int | None = None
    node: str | None = None
    link: tuple[str, str] | None = None
    """For `slow`: the names of the two nodes that the link joins, in ascending order."""
    iteration: int | None = None
    phase: Phase = "forward"
    speed: float | None = None
    """For `slow`: the remaining speed, from 0.01 to below 1, relative to the healthy speed."""
    until: int | None = None
    """For `slow`: the first iteration at full speed again; None if the target stays slow until the end."""
    every: int = 1
    """For `slow`: only iterations divisible by this number are slow."""

    @property
    def target(self) -> str:
        if self.link is not None:
            return f"link={self.link[0]}-{self.link[1]}"
        return f"rank={self.rank}" if self.rank is not None else f"node={self.node}"

    def hits(self, rank: int, node: str) -> bool:
        """Return whether the fault's target is `rank`, its node `node`, or a link that ends at `node`."""
        return self.rank == rank or self.node == node or node in (self.link or ())

    def __str__(self) -> str:
        speed = "" if self.speed is None else f",speed={self.speed:g}"
        when = "" if self.iteration is None else f"@iteration={self.iteration},phase={self.phase}"
        until = "" if self.until is None else f",until={self.until}"
        period = "" if self.every == 1 else f",every={self.every}"
        return f"{self.kind}:{self.target}{speed}{when}{until}{period}"


_SLOW_EXAMPLE = "example: slow:rank=5,speed=0.5@iteration=10,until=40"


def parse(text: str, fault_id: int) -> Fault:
    """Parse one `--fault` value.

    Raises ConfigurationError; the message names the invalid part and shows a valid example.
    """
    example = "example: kill:rank=1@iteration=3,phase=backward"
    head, at, when = text.partition("@")
    kind, colon, target = head.partition(":")
    if not at or not colon:
        raise ConfigurationError(f"fault {text!r}: expected KIND:TARGET@WHEN; {example}")
    if kind not in get_args(Kind):
        raise ConfigurationError(f"fault {text!r}: unknown kind {kind!r}, one of {', '.join(get_args(Kind))}")
    example = _SLOW_EXAMPLE if kind == "slow" else example
    values = _read_values(text, target, when, example)
    _check_keys(text, kind, values, example)
    phase = values.get("phase", "forward")
    if phase not in get_args(Phase):
        raise ConfigurationError(f"fault {text!r}: unknown phase {phase!r}, one of {', '.join(get_args(Phase))}")
    iteration, rank = _read_numbers(text, values, example)
    link = ends(values["link"]) if "link" in values else None
    if "link" in values and link is None:
        example = "example: slow:link=n1-n2,speed=0.3@iteration=10"
        raise ConfigurationError(f"fault {text!r}: link={values['link']} is not two nodes; {example}")
    speed, until, period = _slowness(text, values, iteration) if kind == "slow" else (None, None, 1)
    return Fault(
        id=fault_id,
        kind=kind,  # type: ignore[arg-type]
        rank=rank,
        node=values.get("node"),
        link=link,
        iteration=iteration,
        phase=phase,  # type: ignore[arg-type]
        speed=speed,
        until=until,
        every=period,
    )


def _read_values(text: str, target: str, when: str, example: str) -> dict[str, str]:
    """Read the `key=value` parts of a fault's target and time."""
    values: dict[str, str] = {}
    for part in (*target.split(","), *when.split(",")):
        key, equals, value = part.partition("=")
        if not equals or not value or key in values:
            raise ConfigurationError(f"fault {text!r}: {part!r} is not one key=value; {example}")
        values[key] = value
    return values


def _check_keys(text: str, kind: str, values: dict[str, str], example: str) -> None:
    """Raise ConfigurationError unless the fault has only keys of its kind and exactly one target valid for its kind."""
    slow_keys = ("link", "speed", "until", "every") if kind == "slow" else ()
    unknown = set(values) - {"rank", "node", "iteration", "phase", *slow_keys}
    if unknown:
        raise ConfigurationError(f"fault {text!r}: {', '.join(sorted(unknown))} does not apply to {kind}; {example}")
    if len(values.keys() & {"rank", "node", "link"}) != 1:
        targets = "rank=R, node=N and link=N-M" if kind == "slow" else "rank=R and node=N"
        raise ConfigurationError(f"fault {text!r}: the target is one of {targets}; {example}")
    if kind in ("hang", "raise") and "node" in values:
        raise ConfigurationError(f"fault {text!r}: {kind} happens to a rank, not to a node; {example}")
    if kind == "disconnect" and "rank" in values:
        example = "example: disconnect:node=n2@iteration=3"
        raise ConfigurationError(f"fault {text!r}: disconnect happens to a node, not to a rank; {example}")


def _read_numbers(text: str, values: dict[str, str], example: str) -> tuple[int, int | None]:
    """Return the iteration, and the rank; the rank is None if the target is a node or a link."""
    try:
        iteration = int(values["iteration"])
        rank = int(values["rank"]) if "rank" in values else None
    except (KeyError, ValueError):
        raise ConfigurationError(f"fault {text!r}: iteration and rank are whole numbers; {example}") from None
    if iteration < 1 or (rank is not None and rank < 0):
        raise ConfigurationError(f"fault {text!r}: iterations count from 1, ranks from 0; {example}")
    return iteration, rank


def ends(link: str) -> tuple[str, str] | None:
    """Return the two node names of a link `n1-n2` in ascending order; None if `link` is not two different names.

    Node names may contain dashes, but both names must contain equally many.
    """
    parts = link.split("-")
    middle, odd = divmod(len(parts), 2)
    a, b = "-".join(parts[:middle]), "-".join(parts[middle:])
    return None if odd or not all(parts) or a == b else (min(a, b), max(a, b))


def _slowness(text: str, values: dict[str, str], iteration: int) -> tuple[float, int | None, int]:
    example = _SLOW_EXAMPLE
    try:
        speed = float(values["speed"])
        until = int(values["until"]) if "until" in values else None
        period = int(values.get("every", 1))
    except (KeyError, ValueError):
        wanted = "slow needs a speed; until and every are whole numbers"
        raise ConfigurationError(f"fault {text!r}: {wanted}; {example}") from None
    if not 0.01 <= speed < 1.0:
        raise ConfigurationError(f"fault {text!r}: a speed is from 0.01 to below 1, which is healthy; {example}")
    if until is not None and until <= iteration:
        raise ConfigurationError(f"fault {text!r}: it ends before it begins; {example}")
    if period < 1:
        raise ConfigurationError(f"fault {text!r}: every=10 is one iteration in ten, every=1 all of them; {example}")
    return speed, until, period
