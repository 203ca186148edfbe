"""What is used of torch's NCCL back end, and whether a version of torch has it. Runs where only torch is installed.

    python nccl_contract.py NAME ...

Imports torch's CUDA build, which needs no GPU, prints one JSON object: its version, NCCL's, and for each line of the
contract an empty text or what is wrong with it. NAMEs are environment variables that the back end must know. A line
names a callable and its arguments, an option and a value that it must take, or an exception. What calls them:
`resihp.executor.backends`, `resihp.executor.compute.channels`, `resihp.executor.compute.device_waits`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

CALLS = {
    "__init__": ("store", "rank", "size", "options"),
    "eager_connect_single_device": (),
    "abort": (),
    "rank": (),
    "size": (),
    "allreduce": ("tensors", "opts"),
    "broadcast": ("tensors", "opts"),
    "_allgather_base": ("output", "input"),
    "_reduce_scatter_base": ("outputTensor", "inputTensor"),
}
"""Of ProcessGroupNCCL: names of the arguments that are documented; we pass them by position."""
OPTIONS: dict[str, object] = {
    "_timeout": timedelta(seconds=7),
    "is_high_priority_stream": True,
    "global_ranks_in_group": [3, 5],
    "split_color": 1,
    "config.blocking": 0,
    "config.max_ctas": 4,
}
"""Of ProcessGroupNCCL.Options: each must keep such a value. `split_from` must be there; without a GPU there is no value
for it."""
COLLECTIVE_OPTIONS: dict[str, dict[str, object]] = {
    "AllreduceOptions": {"asyncOp": False},
    "BroadcastOptions": {"rootRank": 1, "rootTensor": 0},
}
EXCEPTIONS = ("OutOfMemoryError", "AcceleratorError")
"""Of torch: RuntimeErrors that are no peer's fault."""


def main() -> None:
    import torch

    dist: Any = torch.distributed
    found = {f"torch.{name}": judged(lambda name=name: is_error(torch, name)) for name in EXCEPTIONS}  # type: ignore[misc]
    found["cuda.Event.cuda_event"] = "" if hasattr(torch.cuda.Event, "cuda_event") else "missing"
    backend = getattr(dist, "ProcessGroupNCCL", None)
    if backend is None:
        found["ProcessGroupNCCL"] = "missing"
    else:
        for name, arguments in CALLS.items():
            found[f"{name}({', '.join(arguments)})"] = judged(
                lambda name=name, arguments=arguments: takes(getattr(backend, name), arguments)  # type: ignore[misc]
            )
        options = backend.Options()
        for name, value in OPTIONS.items():
            found[f"Options.{name}"] = judged(lambda name=name, value=value: keeps(options, name, value))  # type: ignore[misc]
        found["Options.split_from"] = "" if hasattr(backend.Options, "split_from") else "missing"
    for kind, values in COLLECTIVE_OPTIONS.items():
        for name, value in values.items():
            found[f"{kind}.{name}"] = judged(
                lambda kind=kind, name=name, value=value: keeps(getattr(dist, kind)(), name, value)  # type: ignore[misc]
            )
    library = Path(torch.__file__).parent / "lib" / "libtorch_cuda.so"
    known = library.read_bytes() if library.exists() else b""
    found |= {name: "" if name.encode() in known else "unknown to the library" for name in sys.argv[1:]}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if backend is not None else "none"
    print(json.dumps({"torch": str(torch.__version__), "nccl": nccl, "found": found}))


def judged(look: Callable[[], str]) -> str:
    try:
        return look()
    except AttributeError as error:
        return f"missing: {error}"
    except (TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def is_error(torch: Any, name: str) -> str:
    return "" if issubclass(getattr(torch, name), RuntimeError) else "is no RuntimeError"


def takes(method: Any, arguments: tuple[str, ...]) -> str:
    """Whether one of its documented forms begins with these arguments."""
    forms = re.findall(r"\((self[^\n]*)\) ->", method.__doc__ or "")
    for form in forms:
        names = re.findall(r"(?:^|, )(\w+): ", form)[1:]
        if tuple(names[: len(arguments)]) == arguments:
            return ""
    return f"takes {forms or 'nothing that is documented'}"


def keeps(options: Any, path: str, value: object) -> str:
    *owners, name = path.split(".")
    for owner in owners:
        options = getattr(options, owner)
    if not hasattr(options, name):
        return "missing"
    setattr(options, name, value)
    kept = getattr(options, name)
    return "" if kept == value else f"keeps {kept!r} of {value!r}"


if __name__ == "__main__":
    main()
