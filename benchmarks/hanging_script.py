"""A plain DDP script that hangs as it is told: the script of `benchmarks.hangs`.

`python hanging_script.py FOLDER HANGS`; HANGS is a JSON list with one hang for each start of the script, as made by
`benchmarks.hangs`. A rank that is about to hang writes `hung.START.RANK` into FOLDER; rank 0 writes `begun.START` after
its first iteration. After the last hang the script trains for a few seconds and ends.
"""

import ctypes
import fcntl
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FOREVER_S = 10**6
WIDTH, CHECKPOINT_EVERY, LAST_ITERATIONS = 16, 20, 60
folder, hangs = Path(sys.argv[1]), json.loads(sys.argv[2])
start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
hang = hangs[start] if start < len(hangs) else None


def hang_in_sleep() -> None:
    while True:
        time.sleep(1)


def hang_in_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_in_deadlock() -> None:
    first, second, both = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both.wait()
            with first:
                pass

    threading.Thread(target=other, daemon=True).start()
    with first:
        both.wait()
        with second:
            pass


def hang_in_event() -> None:
    threading.Event().wait()


def hang_in_queue() -> None:
    queue.Queue().get()


def hang_in_polling() -> None:
    batches: queue.Queue[None] = queue.Queue()
    while True:
        try:
            batches.get(timeout=0.5)
        except queue.Empty:
            continue


def hang_in_join() -> None:
    thread = threading.Thread(target=hang_in_sleep, daemon=True)
    thread.start()
    thread.join()


def hang_in_future() -> None:
    ThreadPoolExecutor(1).submit(hang_in_event).result()


def hang_in_pipe() -> None:
    os.read(os.pipe()[0], 1)


def hang_in_fifo() -> None:
    path = folder / f"fifo.{start}.{rank}"
    os.mkfifo(path)
    path.read_text()


def hang_in_socket() -> None:
    pair = socket.socketpair()
    pair[0].recv(1)


def hang_in_http() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    urllib.request.urlopen(f"http://127.0.0.1:{server.getsockname()[1]}/metrics").read()


def hang_in_subprocess() -> None:
    subprocess.run(["sleep", str(FOREVER_S)])


def hang_in_flock() -> None:
    path = folder / f"lock.{start}.{rank}"
    with path.open("w") as held, path.open("w") as wanted:
        fcntl.flock(held, fcntl.LOCK_EX)
        fcntl.flock(wanted, fcntl.LOCK_EX)


def hang_in_library() -> None:
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def hang_in_library_with_gil() -> None:
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def hang_in_stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_in_store() -> None:
    dist.distributed_c10d._get_default_store().get("never set")


def hang_in_spin() -> None:
    while True:
        pass


class Batches(Dataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(FOREVER_S if index else 0)
        return torch.zeros(1)


def hang_in_loader() -> None:
    for _ in DataLoader(Batches(), num_workers=1):
        pass


def hang_in_all_gather() -> None:
    dist.all_gather([torch.zeros(1) for _ in range(world)], torch.zeros(1))


def hang_in_scatter() -> None:
    dist.scatter(torch.zeros(1), src=(rank + 1) % world)


def hang_in_broadcast() -> None:
    dist.broadcast(torch.zeros(1), src=(rank + 1) % world)


def hang_in_recv() -> None:
    dist.recv(torch.zeros(1), src=(rank + 1) % world, tag=7)


def hang_in_objects() -> None:
    dist.all_gather_object([None] * world, "metrics")


def hang_in_async() -> None:
    dist.all_gather([torch.zeros(1) for _ in range(world)], torch.zeros(1), async_op=True).wait()


def hangs_here(place: str) -> None:
    """Hang, if this is the rank, the iteration and the place."""
    if hang is not None and rank in hang["ranks"] and place == hang["place"] and iteration >= first + hang["after"]:
        (folder / f"hung.{start}.{rank}").touch()
        globals()[f"hang_in_{hang['kind']}"]()


def save() -> None:
    if rank == 0:
        (folder / "checkpoint.new").write_text(str(iteration))
        (folder / "checkpoint.new").rename(folder / "checkpoint")
    hangs_here("save")
    dist.barrier()


def average_of(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    if hang is None or not hang["is_async"]:
        dist.all_reduce(total)
    else:
        work = dist.all_reduce(total, async_op=True)
        work.wait()
    return total.item() / world


def train() -> None:
    hangs_here("forward")
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(iteration * world + rank))
    loss = (model(inputs) - inputs.sin()).square().mean()
    loss.register_hook(lambda gradient: hangs_here("backward"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average = average_of(loss)
    if rank == 0:
        print(f"iteration {iteration}/{last} loss {average:.4f}", flush=True)
    if iteration == first:
        (folder / f"begun.{start}.{rank}").touch()
    hangs_here("evaluation")
    if iteration % CHECKPOINT_EVERY == 0:
        save()
    time.sleep(0.05)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer.register_step_pre_hook(lambda *_: hangs_here("optimizer"))
checkpoint = folder / "checkpoint"
first = int(checkpoint.read_text()) + 1 if checkpoint.exists() else 1
last = first + LAST_ITERATIONS if hang is None else first + 10 * hang["after"]
iteration = first
while iteration <= last:
    train()
    iteration += 1
dist.destroy_process_group()
