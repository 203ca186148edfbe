"""One realistic line, or more, for each kind of clue. Exceptions stand as a whole traceback."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.detector.diagnosis.xids import XIDS


def traceback(error: str, prefix: str = "", raised_in: str = "") -> str:
    """`raised_in`: a library's file, beneath the script's frames."""
    lines = (
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 88, in <module>',
        "    main()",
        '  File "/home/me/train.py", line 71, in main',
        "    loss = step(batch)",
        "           ^^^^^^^^^^^",
        *((f'  File "/opt/lib/python3.11/{raised_in}", line 239, in call', "    call()") if raised_in else ()),
        error,
    )
    return "\n".join(prefix + line for line in lines)


CAUSED = "\n\nThe above exception was the direct cause of the following exception:\n\n"
DURING = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
_POOL = (
    "HTTPConnectionPool(host='wandb.local', port=8080): Max retries exceeded with url: /graphql (Caused by "
    "NewConnectionError(\"HTTPConnection(host='wandb.local', port=8080): Failed to establish a new connection: "
    '[Errno 111] Connection refused"))'
)
REFUSED_BY_A_SERVICE = DURING.join(
    (
        CAUSED.join(
            (
                traceback("ConnectionRefusedError: [Errno 111] Connection refused", raised_in="urllib3/connection.py"),
                traceback(f"urllib3.exceptions.MaxRetryError: {_POOL}", raised_in="urllib3/util/retry.py"),
            )
        ),
        traceback(f"requests.exceptions.ConnectionError: {_POOL}", raised_in="requests/adapters.py"),
    )
)
"""Of wandb, for instance, as requests 2.32 has it."""
GLOO_CLOSED = traceback(
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:39831: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application.",
    raised_in="torch/distributed/distributed_c10d.py",
)
NCCL_REFUSED = traceback(
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1691, "
    "unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.19.3\n"
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. \n"
    "Last error:\n"
    "socketStartConnect: Connect to 10.0.0.2<41234> failed : Connection refused",
    raised_in="torch/distributed/distributed_c10d.py",
)
LOST_PEERS = {
    "gloo": GLOO_CLOSED,
    "gloo under autograd": GLOO_CLOSED.replace("torch/distributed/distributed_c10d", "torch/autograd/graph"),
    "gloo refused": traceback(
        "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] Connection refused",
        raised_in="torch/distributed/distributed_c10d.py",
    ),
    "store": traceback(
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of "
        "(gpu-17, 29500). The client socket has failed to connect to gpu-17:29500 (errno: 111 - Connection refused).",
        raised_in="torch/distributed/rendezvous.py",
    ),
    "store, asked by the script": traceback("torch.distributed.DistNetworkError: Broken pipe"),
    "an old store": traceback("RuntimeError: Connection reset by peer"),
    "sockets of torch's": traceback(
        "ConnectionResetError: [Errno 104] Connection reset by peer", raised_in="torch/distributed/rpc/api.py"
    ),
    "NCCL": traceback(
        "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, remote process exited or there was a "
        "network error, NCCL version 2.20.5\nncclRemoteError: A call failed possibly due to a network error or a "
        "remote process exiting prematurely.\nLast error:\nsocketStartConnect: Connect to 10.0.0.2<41234> failed : "
        "Connection refused",
        raised_in="torch/distributed/distributed_c10d.py",
    ),
    "NCCL, refused": NCCL_REFUSED,
}
"""By their process group's own words."""
FAILED_CONNECTIONS = {
    "requests": REFUSED_BY_A_SERVICE,
    "urllib": DURING.join(
        (
            traceback("ConnectionRefusedError: [Errno 111] Connection refused", raised_in="socket.py"),
            traceback("urllib.error.URLError: <urlopen error [Errno 111] Connection refused>", raised_in="urllib.py"),
        )
    ),
    "redis": traceback(
        "redis.exceptions.ConnectionError: Error 111 connecting to localhost:6379. Connection refused.",
        raised_in="redis/connection.py",
    ),
    "no route": traceback("httpx.ConnectError: [Errno 113] No route to host", raised_in="httpx/_transports/default.py"),
    "a socket of the script's": traceback("BrokenPipeError: [Errno 32] Broken pipe"),
    "told anew by the script": REFUSED_BY_A_SERVICE
    + CAUSED
    + traceback("RuntimeError: no tracking server: [Errno 111] Connection refused"),
    "after a lost peer": GLOO_CLOSED + CAUSED + traceback("RuntimeError: step 17 failed"),
}
"""To whom, their words do not tell for sure."""


def xid(code: int, bus: str = "0000:3b:00", pid: int | str = "'<unknown>'") -> str:
    return f"[191433.212907] NVRM: Xid (PCI:{bus}): {code}, pid={pid}, name=python, {XIDS[code].description}"


_KERNEL: dict[str, Sequence[str]] = {
    "xid 79": (
        "[191433.212907] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "Mar  3 09:26:51 gpu-17 kernel: NVRM: Xid (0000:3b:00): 79, GPU has fallen off the bus.",
        "[7.1] NVRM: Xid (PCI:000c:01:00): 79, pid=0, GPU has fallen off the bus.",
    ),
    "xid 31": (
        "[88.100000] NVRM: Xid (PCI:0000:89:00): 31, pid=2217, name=python, Ch 00000008, intr 00000000. MMU Fault: "
        "ENGINE GRAPHICS GPCCLIENT_T1_4 faulted @ 0x7f0a_5c000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
    ),
    "xid 94": (
        "[7.1] NVRM: Xid (PCI:0000:3b:00 GPU-I:01): 94, pid='<unknown>', name=<unknown>, Contained: SM (0x1). RST: No",
        "[7.1] NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:00): 94, pid=2217, name=python3, Contained: SM (0x1). RST: No",
    ),
    "xid 45": (
        "[7.1] NVRM: Xid (PCI:0000:dc:00 GPU-I:13 GPU-CI:02): 45, pid=2217, name=pt_main_thread, Ch 00000001 caused by "
        "previous Xid 149",
    ),
    "xid 63": (
        "NVRM: Xid (PCI:0000:b3:00): 63, pid=1, Row Remapper: New row (0x00000000035c21c9) marked for remapping",
    ),
    "xid 149": (
        "[7.1] NVRM: Xid (PCI:0019:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 05 (0x025001c6 0x00000000 0x00000000)",
        "[7.1] NVRM: Xid (PCI:0019:01:00): 149, pid='<unknown>', name=<unknown>, NETIR_BER_EVENT Nonfatal XC1 i0 Link "
        "3",
    ),
    "xid 145": ("NVRM: Xid (PCI:0000:9b:00): 145, RLW_REMAP Nonfatal XC0 i0 Link 0 (0x00000010 0x00000004)",),
    "sxid fatal": ("[7.1] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",),
    "sxid": (
        "[7.1] nvidia-nvswitch0: SXid (PCI:0000:85:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error",
    ),
    "gpu off the bus": (
        "[9.9] NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "[9.9] NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:2330) installed in this system has fallen off the bus",
        "[ 1843.308145] NVRM: The NVIDIA GPU 0000:3b:00.0\n               NVRM: (PCI ID: 10de:26b5) installed in this "
        "system has\n               NVRM: fallen off the bus and is not responding to commands.",
    ),
    "gpu initialisation": ("[5.5] NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0x56:1474)",),
    "row remapping": ("[5.5] NVRM: GPU0 Row Remapper: Error recording row remapping for row 0x2a1 in the InfoROM",),
    "pcie fatal": ("[5.5] pcieport 0000:3a:00.0: AER: Uncorrected (Fatal) error received: 0000:3b:00.0",),
    "pcie non-fatal": (
        "[5.5] pcieport 0000:3a:00.0: AER: Uncorrectable (Non-Fatal) error message received from 0000:3b:00.0",
        "[5.5] nvme 0000:01:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
    ),
    "machine check": (
        "[5.5] mce: [Hardware Error]: CPU 12: Machine Check Exception: 5 Bank 7: be00000000800400",
        "[5.5] mce: [Hardware Error]: CPU 40: Machine Check: 0 Bank 17: fc2040000000011b",
    ),
    "hardware error": ("[5.5] {1}[Hardware Error]: event severity: fatal",),
    "hardware error handled": ("[5.5] {1}[Hardware Error]: event severity: recoverable",),
    "uncorrected memory": ("[5.5] EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0",),
    "poisoned memory": ("Memory failure: 0x3f2a91: Killing python:2217 due to hardware memory corruption",),
    "corrected memory": ("[5.5] EDAC MC0: 1 CE memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#1",),
    "machine checks logged": (
        "[5.5] mce: [Hardware Error]: Machine check events logged",
        "[5.5] mce: [Hardware Error]: CPU 40: Machine Check: 0 Bank 17: dc2040000000011b",
    ),
    "kernel panic": ("[5.5] Kernel panic - not syncing: Fatal machine check",),
    "overheated": ("[5.5] thermal thermal_zone0: acpitz: critical temperature reached, shutting down",),
    "cpu throttled": ("[5.5] mce: CPU12: Package temperature above threshold, cpu clock throttled (total events = 8)",),
    "soft lockup": ("[5.5] watchdog: BUG: soft lockup - CPU#12 stuck for 23s! [python:2217]",),
    "blocked task": ("[5.5] INFO: task python:2217 blocked for more than 120 seconds.",),
    "memory cgroup": (
        "[5.5] Memory cgroup out of memory: Killed process 2217 (python) total-vm:91823412kB, anon-rss:64891234kB",
        "[5.5] Memory cgroup out of memory: Kill process 2217 (python) score 998 or sacrifice child",
        "[5.5] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=step_0,mems_allowed=0-1,oom_memcg=/slurm/"
        "uid_1000/job_4711,task_memcg=/slurm/uid_1000/job_4711/step_0/task_3,task=pt_main_thread,pid=2217,uid=1000",
    ),
    "host memory": (
        "[5.5] Out of memory: Killed process 2217 (python) total-vm:91823412kB, anon-rss:64891234kB",
        "[5.5] Out of memory: Kill process 2217 (python) score 903 or sacrifice child",
        "[5.5] Out of memory (oom_kill_allocating_task): Killed process 2217 (python) total-vm:91823412kB",
        "[5.5] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/"
        "user.slice,task=python,pid=2217,uid=1000",
    ),
    "kernel segfault": ("[5.5] python[2217]: segfault at 0 ip 00007f2b1c0a1b2e sp 00007ffd8 error 4 in libc.so.6",),
    "kernel trap": (
        "[5.5] traps: python[2217] general protection fault ip:7f2b1c0a1b2e sp:7ffd8 error:0 in libc.so.6",
    ),
    "port down": (
        "[5.5] mlx5_core 0000:5e:00.0 ens1f0: Link down",
        "[5.5] mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged",
        "[5.5] bnxt_en 0000:5e:00.0 eth0: NIC Link is Down",
        "[5.5] igb 0000:02:00.0 eno1: igb: eno1 NIC Link is Down",
        "[5.5] bond0: (slave eth0): link status definitely down, disabling slave",
    ),
    "nic failure": (
        "[5.5] mlx5_core 0000:5e:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count",
        "[5.5] mlx5_core 0000:5e:00.0: wait_func:1152:(pid 99): ACCESS_REG(0x805) timeout. Will cause a leak of a "
        "command resource",
    ),
    "nic stuck": ("[5.5] NETDEV WATCHDOG: eth0 (bnxt_en): transmit queue 3 timed out",),
    "disk failure": (
        "[5.5] blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ) flags 0x0",
        "[5.5] nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff",
    ),
    "file system damaged": ("[5.5] EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm python",),
    "file server silent": (
        "[5.5] nfs: server fs1 not responding, still trying",
        "[5.5] LustreError: 11-0: scratch-OST0004-osc-ffff9: operation ost_read to node 10.0.0.4@o2ib failed: rc = "
        "-107",
        "[5.5] Lustre: scratch-OST0004-osc-ffff9: Connection to scratch-OST0004 (at 10.0.0.4@o2ib) was lost; in "
        "progress operations using this service will wait for recovery to complete",
        "[5.5] LustreError: 167-0: scratch-MDT0000-mdc-ffff9: This client was evicted by scratch-MDT0000; in progress "
        "operations using this service will fail.",
    ),
    "link recovered": (
        "[5.5] bnxt_en 0000:5e:00.0 eth0: NIC Link is Down\n[8.5] bnxt_en 0000:5e:00.0 eth0: NIC Link is Up, 100000 "
        "Mbps full duplex, Flow control: none",
        "[5.5] igb 0000:02:00.0 eno1: igb: eno1 NIC Link is Down\n[9.5] igb 0000:02:00.0 eno1: igb: eno1 NIC Link is "
        "Up "
        "1000 Mbps Full Duplex, Flow Control: RX/TX",
        "[5.5] mlx5_core 0000:5e:00.0 ens1f0: Link down\n[7.5] mlx5_core 0000:5e:00.0 ens1f0: Link up",
        "[5.5] mlx5_core 0000:5e:00.0: Port module event: module 0, Cable unplugged\n[7.5] mlx5_core 0000:5e:00.0: "
        "Port "
        "module event: module 0, Cable plugged",
        "[5.5] bond0: (slave eth0): link status definitely down, disabling slave\n[7.5] bond0: (slave eth0): link "
        "status "
        "definitely up, 25000 Mbps full duplex",
        "[5.5] NETDEV WATCHDOG: eth0 (bnxt_en): transmit queue 3 timed out\n[9.5] bnxt_en 0000:5e:00.0 eth0: NIC Link "
        "is "
        "Up, 100000 Mbps full duplex",
        "[5.5] mlx5_core 0000:5e:00.0: poll_health:800:(pid 0): device's health compromised - reached miss count\n"
        "[9.5] mlx5_core 0000:5e:00.0: mlx5_health_try_recover:350:(pid 7): health recovery succeeded",
        "gpu-17:983:1261 [3] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port error(10)\n"
        "gpu-17:983:1261 [3] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: client reregistration(17)\n"
        "gpu-17:983:1261 [3] NCCL WARN NET/IB : mlx5_0:1 Got non-fatal async event: port active(9)",
    ),
    "storage recovered": (
        "[5.5] nfs: server fs1 not responding, still trying\n[9.5] nfs: server fs1 OK",
        "[5.5] LustreError: 166-1: MGC10.0.0.1@o2ib: Connection to MGS (at 10.0.0.1@o2ib) was lost; in progress "
        "operations using this service will fail\n[6.5] Lustre: MGC10.0.0.1@o2ib: Connection restored to MGS",
        "[5.5] LustreError: 11-0: scratch-OST0004-osc-ffff9: operation ost_read to node 10.0.0.4@o2ib failed: rc = -107"
        "\n[5.6] Lustre: scratch-OST0004-osc-ffff9: Connection to scratch-OST0004 (at 10.0.0.4@o2ib) was lost; in "
        "progress operations using this service will wait for recovery to complete\n"
        "[6.5] Lustre: scratch-OST0004-osc-ffff9: Connection restored to scratch-OST0004 (at 10.0.0.4@o2ib)",
        "[5.5] nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0xffff\n[9.5] nvme nvme0: "
        "16/0/0 "
        "default/read/poll queues",
    ),
    "pcie recovered": (
        "[5.5] pcieport 0000:3a:00.0: AER: Uncorrected (Non-Fatal) error received: 0000:3b:00.0\n[6.5] pcieport "
        "0000:3a:00.0: AER: device recovery successful",
    ),
}
_SLURM: dict[str, Sequence[str]] = {
    "time limit": ("slurmstepd: error: *** JOB 4711 ON gpu-17 CANCELLED AT 2025-03-03T09:26:51 DUE TO TIME LIMIT ***",),
    "preempted": ("slurmstepd: error: *** JOB 4711 ON gpu-17 CANCELLED AT 2025-03-03T09:26:51 DUE TO PREEMPTION ***",),
    "node failure": (
        "slurmstepd: error: *** JOB 4711 ON gpu-17 CANCELLED AT 2025-03-03T09:26:51 DUE TO NODE FAILURE, SEE SLURMCTLD "
        "LOG FOR DETAILS ***",
        "srun: error: Node failure on gpu-18",
    ),
    "slurm oom": (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Detected 2 oom-kill event(s) in StepId=191.batch cgroup. Some of your processes may have "
        "been killed by the cgroup out-of-memory handler.",
        "srun: error: gpu-17: task 4: Out Of Memory",
        "srun: error: gpu-17: tasks 0-3,5: Out Of Memory",
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 370626.batch cgroup",
        "Some of your processes may have been killed by the cgroup out-of-memory handler.",
        "slurmstepd: error: Job 4711 exceeded memory limit (33893560 > 33554432), being killed",
        "slurmstepd: error: Step 4711.0 exceeded memory limit (33893560 > 33554432), being killed",
        "[2025-03-03T09:26:51.123] [4711.0] error: StepId=4711.0 exceeded memory limit (34706 > 34359), being killed",
        "slurmstepd: error: StepId=4711_5.batch exceeded virtual memory limit (34706 > 34359), being killed",
    ),
    "memory limit reached": (
        "slurmstepd: error: Exceeded job memory limit at some point.",
        "slurmstepd: StepId=4711.0 hit memory+swap limit at least once during execution. This may or may not result in "
        "some failure.",
    ),
    "unkillable": (
        "[2025-03-03T09:26:51.002] [4711.0] error: *** STEP 4711.0 STEPD TERMINATED ON n0 AT 2025-03-03T09:26:51 DUE "
        "TO "
        "JOB NOT ENDING WITH SIGNALS ***",
        "slurmstepd: error: *** JOB 4711 STEPD TERMINATED ON n0 AT 2025-03-03T09:26:51 DUE TO JOB NOT ENDING WITH "
        "SIGNALS ***",
        "slurmstepd: error: *** EXTERN STEP FOR 4711 STEPD TERMINATED ON n0 AT 2025-03-03T09:26:51 DUE TO JOB NOT "
        "ENDING "
        "WITH SIGNALS ***",
    ),
    "gpus missing": (
        "Reason=gres/gpu count reported lower than configured (0 < 8) [slurm@2025-03-03T09:26:51]",
        "error: Setting node n0 state to DRAIN with reason:gres/gpu count too low (4 < 8)",
        "error: Setting node n0 state to INVAL with reason:gres/gpu count reported lower than configured (7 < 8)",
    ),
    "srun ports": (
        "srun: error: slurm_init_msg_engine_port error Address already in use",
        "srun: fatal: slurm_init_msg_engine_port error Too many open files",
    ),
    "nodes left out": (
        "srun: error: Required nodelist includes more nodes than permitted by max-node count (2 > 1). Eliminating "
        "nodes "
        "from the nodelist.",
    ),
    "epilog": (
        "slurmd[13562]: spank-epilog: error: pyxis: mkdir: cannot create directory '/opt/nvme/tmp/enroot/data': "
        "Permission denied",
    ),
    "container": (
        "slurmstepd: error: pyxis: container start failed with error code: 1",
        "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1",
    ),
    "cancelled": ("slurmstepd: error: *** STEP 4711.0 ON gpu-17 CANCELLED AT 2025-03-03T09:26:51 ***",),
    "task ended": (
        "srun: error: gpu-17: task 3: Killed",
        "srun: error: gpu-17: tasks 0-7: Exited with exit code 1",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        "srun: Terminating StepId=4711.0",
    ),
}
_CUDA: dict[str, Sequence[str]] = {
    "cuda ecc": (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "gpu-17:2217:2301 [3] enqueue.cc:1402 NCCL WARN Cuda failure 214 'uncorrectable ECC error encountered'",
    ),
    "cuda nvlink": ("RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",),
    "gpu lost": (
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover this "
        "GPU",
    ),
    "no gpu": (
        "RuntimeError: CUDA error: no CUDA-capable device is detected",
        "RuntimeError: No CUDA GPUs are available",
    ),
    "gpu busy": ("RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",),
    "fabric manager": (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
    ),
    "driver mismatch": ("Failed to initialize NVML: Driver/library version mismatch",),
    "driver too old": (
        "RuntimeError: CUDA driver version is insufficient for CUDA runtime version",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
    ),
    "nvml unknown": ("Failed to initialize NVML: Unknown Error",),
    "illegal access": (
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "[rank3]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0(default_pg) Rank 3] Process "
        "group "
        "watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        "cuda_driver: CUDA_ERROR_ILLEGAL_ADDRESS",
    ),
    "device assert": (
        "RuntimeError: CUDA error: device-side assert triggered",
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1289: indexSelectLargeIndex: block: [173,0,0], thread: "
        "[64,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed.",
    ),
    "launch failure": ("RuntimeError: CUDA error: unspecified launch failure",),
    "bad kernel": (
        "RuntimeError: CUDA error: misaligned address",
        "RuntimeError: CUDA error: an illegal instruction was encountered",
    ),
    "launch timeout": ("RuntimeError: CUDA error: the launch timed out and was terminated",),
    "no kernel": ("RuntimeError: CUDA error: no kernel image is available for execution on the device",),
    "gpu memory": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
        "79.10 GiB "
        "of which 1.31 GiB is free. Including non-PyTorch memory, this process has 77.78 GiB memory in use.",
        "RuntimeError: CUDA error: out of memory",
        "gpu-17:2217:2301 [3] include/alloc.h:191 NCCL WARN Cuda failure 2 'out of memory'",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of memory)",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: cudaErrorMemoryAllocation: out of memory",
        "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,147,483,648 bytes (allocated so far: 1 bytes).",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes.",
    ),
    "cuda libraries": ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle)`",),
    "cuda error": ("RuntimeError: CUDA error: invalid resource handle", "Cuda failure 999 'unknown error'"),
}
_NCCL: dict[str, Sequence[str]] = {
    "ib flushed": (
        "gpu-17:983:1261 [3] net_ib.cc:1895 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<55921> with status=5 "
        "opcode=0 len=0 vendor err 249 (Recv) localGid ::ffff:10.0.0.1 remoteGids::ffff:10.0.0.2",
        "gpu-17:983:1261 [3] misc/ibvwrap.cc:301 NCCL WARN NET/IB : Got completion with error 5, opcode 0, len 0, "
        "vendor "
        "err 249",
    ),
    "ib retry exceeded": (
        "gpu-17:983:1261 [3] net_ib.cc:1895 NCCL WARN NET/IB : Got completion from peer 10.0.0.2<55921> with status=12 "
        "opcode=1 len=0 vendor err 129 (Send) localGid ::ffff:10.0.0.1 remoteGids::ffff:10.0.0.2",
        "gpu-17:983:1261 [3] transport/net_ib.cc:912 NCCL WARN NET/IB : Got completion with error 12, opcode 1, len "
        "32631, "
        "vendor err 129",
        "gpu-17:983:1261 [3] net_ib.cc:2271 NCCL WARN NET/IB: Got completion from peer 10.0.0.2<55921> with "
        "status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0) reqSize=0 vendor_err=129",
    ),
    "ib completion": (
        "gpu-17:983:1261 [3] NCCL WARN NET/IB : Got completion from peer 10.0.0.2<55921> with status=10 opcode=2 len=0 "
        "vendor err 136 (Send)",
    ),
    "ib event": (
        "gpu-17:983:1261 [3] NCCL WARN NET/IB: mlx5_0:1 Got async event : local access violation work queue error",
        "gpu-17:983:1261 [3] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error",
        "gpu-17:983:1261 [3] NCCL WARN NET/IB : Got async event : local catastrophic error",
        "[2025-03-03 09:26:51] gpu-17:983:1261 [3] transport/net_ib.cc:253 NCCL WARN NET/IB : mlx5_3:1 Got non-fatal "
        "async event: port error(10)",
        "gpu-17:983:1261 [3] transport/net_ib.cc:226 NCCL WARN NET/IB : mlx5_0:1 async fatal event: local catastrophic "
        "error",
        "gpu-17:983:1261 [3] transport/net_ib.cc:235 NCCL WARN NET/IB : mlx5_0:1 async fatal event on QP (0x7f0a5c): "
        "local access violation work queue error",
        "gpu-17:983:1261 [3] NCCL WARN NET/IB : bnxt_re0:1 async fatal event on CQ (0x7f0a5c): CQ error",
    ),
    "ib no path": (
        "gpu-17:983:1261 [3] NCCL WARN Call to ibv_modify_qp failed with error Connection timed out errno 110",
        "gpu-17:983:1261 [3] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.2<44545> failed : No "
        "route to host",
    ),
    "ib locked memory": ("gpu-17:983:1261 [3] NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",),
    "shm full": (
        "gpu-17:983:1261 [3] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-tVJ1pM to 33030532 "
        "bytes",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: unable to write to file </torch_2217_1>: No space left on device (28): shared memory object",
        "RuntimeError: unable to write to file </torch_2217_1234>",
        "gpu-17:2217:2301 [3] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left on device",
        "gpu-17:2217:2301 [3] include/shm.h:41 NCCL WARN Error while creating shared memory segment nccl-shm-recv-1a2b "
        "(size 33030144)",
    ),
    "ras mismatch": (
        "#0-0 (fa93daea854b060b) MISMATCH\n  Communicator ranks have different AllGather operation counts\n  30 ranks "
        "have "
        "launched up to operation 640\n  2 ranks have launched up to operation 641\n  Rank 12 -- GPU 4 managed by "
        "process "
        "323032 on node 192.0.2.124",
        "  Communicator ranks have different status",
    ),
    "watchdog stuck": (
        "[rank7]:[E626 05:14:36.393067540 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 7] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued "
        "collectives. This typically indicates a NCCL/CUDA API (e.g., CudaEventDestroy) hang blocking the watchdog, "
        "and "
        "could be triggered by another thread holding the GIL inside a CUDA api",
        "[rank7]:[F626 05:22:36.393067540 ProcessGroupNCCL.cpp:1554] [PG ID 0 PG GUID 0(default_pg) Rank 7] "
        "Terminating "
        "the process after attempting to dump debug info, due to ProcessGroupNCCL watchdog hang.",
    ),
    "nccl usage": ("ncclInvalidUsage: This usually reflects invalid usage of NCCL library.",),
    "collective mismatch": (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint",
    ),
    "watchdog": (
        "[rank0]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation "
        "timeout: "
        "WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600060 "
        "milliseconds",
        "[rank4]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:1664] [PG 1 Rank 4] Exception (either an error or timeout) "
        "detected "
        "by watchdog at work: 1580, last enqueued NCCL work: 1582, last completed NCCL work: 1579.",
    ),
    "nccl remote": (
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:275, remote "
        "process exited or there was a network error, NCCL version 2.20.5",
    ),
    "nccl system": (
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    ),
    "nccl cuda": ("ncclUnhandledCudaError: Call to CUDA function failed.",),
    "nccl internal": ("ncclInternalError: Internal check failed.",),
}
_HOST: dict[str, Sequence[str]] = {
    "loader bus error": (
        "RuntimeError: DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's "
        "workers are out of memory.",
    ),
    "loader segfault": ("RuntimeError: DataLoader worker (pid 46794) is killed by signal: Segmentation fault. ",),
    "loader killed": ("RuntimeError: DataLoader worker (pid 46794) is killed by signal: Killed. ",),
    "loader ended": ("RuntimeError: DataLoader worker (pid(s) 46794) exited unexpectedly",),
    "disk full": ("OSError: [Errno 28] No space left on device: '/scratch/me/checkpoints/120'",),
    "quota": ("OSError: [Errno 122] Disk quota exceeded",),
    "stale handle": ("OSError: [Errno 116] Stale file handle: '/data/shard-17.bin'",),
    "io error": ("OSError: [Errno 5] Input/output error",),
    "mount gone": (
        "OSError: [Errno 107] Transport endpoint is not connected: '/mnt/bucket'",
        "OSError: [Errno 30] Read-only file system: '/scratch/log'",
    ),
    "broken file": (
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "RuntimeError: unexpected EOF, expected 1023 more bytes. The file might be corrupted.",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "_pickle.UnpicklingError: pickle data was truncated",
    ),
    "no host memory": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate memory",
        "OSError: [Errno 12] Cannot allocate memory",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 12.0 GiB for an array with shape (1000, 16)",
        "pyarrow.lib.ArrowMemoryError: malloc of size 268435456 failed",
    ),
    "open files": ("OSError: [Errno 24] Too many open files", "RuntimeError: received 0 items of ancdata"),
    "port in use": (
        "ConnectionError: Tried to launch distributed communication on port `11986`, but another process is utilizing "
        "it.",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. "
        "port: "
        "29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "OSError: [Errno 98] Address already in use",
    ),
    "heap": ("double free or corruption (!prev)", "malloc(): unsorted double linked list corrupted"),
    "fatal python": ("Fatal Python error: Segmentation fault",),
    "peer closed": (
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer "
        "[10.0.0.1]:1895",
        "RuntimeError: [../gloo/transport/tcp/pair.cc:589] Read error [10.0.0.1]:25266: Connection reset by peer",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "gpu-17:983:1261 [3] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed by remote peer "
        "gpu-18<39712>",
    ),
    "peer silent": (
        "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to "
        "complete",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 7/8 clients joined.",
        "torch.distributed.DistNetworkError: The client socket has timed out after 600000ms while trying to connect to "
        "(gpu-17, 29500).",
        "RuntimeError: Gloo connectFullMesh failed with [../gloo/transport/tcp/pair.cc:144] no error",
        "RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: "
        "store_based_barrier_key:1 (world_size=16, worker_count=8, timeout=0:30:00)",
        "RuntimeError: Rank 3 failed to pass monitoredBarrier in 1800000 ms",
        "RuntimeError: Rank 0 successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 3. Please check rank 3 logs for faulty rank.",
        "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    ),
    "interrupted transfer": ("resihp.errors.CommunicatorError: all-reduce of epoch 4 was woken: asked to park",),
    "launcher": (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "W0303 09:26:51.0 torch/distributed/elastic/multiprocessing/api.py:858] Sending process 2217 closing signal "
        "SIGTERM",
    ),
}
_PROGRAM: dict[str, Sequence[str]] = {
    "not a number": (
        "ERROR: loss is NaN in iteration 812, stopping",
        "RuntimeError: [Rank 3]: NaN found in input tensor (TORCH_NCCL_NAN_CHECK)",
        traceback("RuntimeError: Unexpected result nan (message='found NaN in local forward loss calculation')"),
    ),
    "shapes": (
        traceback("RuntimeError: mat1 and mat2 shapes cannot be multiplied (32x512 and 256x128)"),
        traceback("RuntimeError: Error(s) in loading state_dict for GPT: size mismatch for head.weight", "[rank5]: "),
    ),
    "not python": ("  File \"/home/me/train.py\", line 12\n    def f(\n         ^\nSyntaxError: '(' was never closed",),
    "arguments": ("usage: train.py [-h] --lr LR\ntrain.py: error: the following arguments are required: --lr",),
    "import": (
        traceback("ModuleNotFoundError: No module named 'flash_attn'"),
        traceback("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory"),
    ),
    "file missing": (traceback("FileNotFoundError: [Errno 2] No such file or directory: '/data/corpus.idx'"),),
    "interrupted": (traceback("KeyboardInterrupt"),),
    "storage failed": (
        traceback("OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/data/shard-17.bin'"),
        traceback("TimeoutError: [Errno 110] Connection timed out: '/mnt/nfs/data/shard-17.bin'", "[rank5]: "),
    ),
    "service failed": (
        traceback("requests.exceptions.HTTPError: 503 Server Error: Service Unavailable for url: https://hub/api"),
        traceback("socket.gaierror: [Errno -3] Temporary failure in name resolution", raised_in="socket.py"),
    ),
    "connection failed": (
        traceback("ConnectionRefusedError: [Errno 111] Connection refused", raised_in="socket.py"),
        traceback(f"requests.exceptions.ConnectionError: {_POOL}", "[rank5]: ", raised_in="requests/adapters.py"),
    ),
    "exception": (
        traceback("ValueError: too many values to unpack (expected 2)"),
        traceback("KeyError: 'input_ids'", "[rank5]: "),
        traceback("AssertionError"),
        traceback("my_project.errors.Diverged: gave up"),
        traceback("__main__.main.<locals>.DataError: shard 17 is empty"),
    ),
}

EXAMPLES: dict[str, Sequence[str]] = _KERNEL | _SLURM | _CUDA | _NCCL | _HOST | _PROGRAM
