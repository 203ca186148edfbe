"""Forks as the fork server does and prints whether the child may use CUDA. Needs a CUDA build of torch, but no GPU.

    python -m tests.integration.fork_after_preload MODULES [ask]

Imports the comma-separated MODULES with the fork server's own function, forks, and prints the version of torch and
`sound` or `bad` in one line of JSON. With `ask`, asks for a GPU before it forks, after which every fork is bad.
"""

from __future__ import annotations

import json
import os
import sys

from resihp.worker.forkserver import preload


def main() -> None:
    preload(sys.argv[1])
    import torch

    if sys.argv[2:] == ["ask"]:
        torch.cuda.is_available()
    child = os.fork()
    if child == 0:
        os._exit(torch._C._cuda_isInBadFork())  # type: ignore[attr-defined,unused-ignore]  # in CUDA builds only
    _, status = os.waitpid(child, 0)
    fork = {0: "sound", 1: "bad"}[os.waitstatus_to_exitcode(status)]
    print(json.dumps({"torch": str(torch.__version__), "fork": fork}))


if __name__ == "__main__":
    main()
