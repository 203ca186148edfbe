"""All ranks of a plain script lose the peer that was killed, at once: what that costs the supervisor, and how long at
most it hears nobody.

    python -m benchmarks.lost_peers [--nodes 128 512 2048] [--times 3]

The controller alone, 8 ranks a node, each of which tells what it raised (gloo's words, under six frames of torch's) and
then ends, with the same in its log. Processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from resihp.controller import interface as api
from resihp.detector.diagnosis.clues import read_log
from resihp.protocol import messages as m
from resihp.record.journal import FailureFound

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.resihp.controller.test_startup import Start
from tests.resihp.detector.lines import traceback

GPUS, KILLED = 8, 9
ERROR = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:{}."
FRAMES = "".join(
    f'  File "/opt/lib/python3.11/site-packages/torch/distributed/c10d_{i}.py", line {i}, in wrapper\n'
    "    return func(*args, **kwargs)\n           ^^^^^^^^^^^^^^^^^^^^^\n"
    for i in range(6)
)


def storm(nodes: int) -> tuple[float, float]:
    """Seconds of all, and of the longest turn."""
    job = Start(nodes=nodes, gpus_per_node=GPUS, spares=0)
    job.join(*job.settings.node_names)
    ranks = range(nodes * GPUS)
    job.spawn(*ranks)
    job.feed(api.AgentBeat(node="n1", beat=m.Beat(workers=(), met=True)))
    events: list[api.AnyEvent] = [api.WorkerExited(rank=KILLED, status=-9)]
    ends: list[api.AnyEvent] = []
    for rank in ranks:
        if rank != KILLED:
            error = ERROR.format(4000 + rank)
            text = traceback(error).replace("RuntimeError", f"{FRAMES}RuntimeError")
            raised = m.Raised(iteration=1, error=error, traceback=text)
            events.append(api.WorkerSaid(rank=rank, message=raised))
            ends.append(api.WorkerExited(rank=rank, status=1, clues=read_log(text)))
    turns = []
    for event in (*events, *ends):
        began = time.process_time()
        job.actions += job.controller.handle(event, job.now)
        turns.append(time.process_time() - began)
    failed = [a.entry for a in job.actions if isinstance(a, api.Log) and isinstance(a.entry, FailureFound)]
    assert [failure.ranks for failure in failed] == [tuple(ranks)], "one failure, with all its victims"
    return sum(turns), max(turns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    for nodes in args.nodes:
        whole, longest = zip(*(storm(nodes) for _ in range(args.times)), strict=True)
        print(
            f"{nodes * GPUS:6,} ranks: {statistics.median(whole):5.2f} s of the supervisor, "
            f"{statistics.median(longest):5.2f} s in one turn"
        )


if __name__ == "__main__":
    main()
