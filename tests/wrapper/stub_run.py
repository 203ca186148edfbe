"""`resihp run` for tests: `stub_run.py guard FILE`, whose supervisors are those of `stub_supervisor.py`.

A guardian imports few modules, and tests start many.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from resihp.wrapper.supervisor.guardian import guard

SUPERVISOR = Path(__file__).with_name("stub_supervisor.py")


def command(run_file: Path, options: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", str(SUPERVISOR), "supervise", str(run_file), *options]


if __name__ == "__main__":
    mode, run_file = sys.argv[1:]
    assert mode == "guard"
    sys.exit(guard(Path(run_file), command))
