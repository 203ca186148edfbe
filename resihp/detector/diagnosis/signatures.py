"""Defines the meaning of lines in workers' logs and in messages of the kernel and Slurm: the table `SIGNATURES`.

Each kind of line is a row. `clues` searches for a row's literal `needles` first, which is fast in megabytes of text,
and then confirms the line by the row's pattern. A pattern is applied to a few hundred characters around the needle and
has bounded quantifiers only, so that no line takes more than linear time. The first row that matches a line gives its
meaning. This module judges no incident (`diagnosis` does).

Texts are those of the Linux kernel, NVIDIA's driver (`xids`), CUDA's `cudaGetErrorString`, NCCL 2.1x-2.2x, gloo,
PyTorch 2.x, Mellanox' mlx5 driver and Slurm 21-25. Status numbers of InfiniBand are libibverbs' `ibv_wc_status`: 5 work
request flushed, 12 transport retry exceeded, 13 receiver not ready; vendor errors 129 and 249 go with 12 and 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum
from typing import Literal

import msgspec

from resihp.detector.diagnosis.xids import XIDS, Xid

Category = Literal[
    "device", "link", "node", "memory", "storage", "service", "program", "allocation", "secondary", "unknown"
]  # fmt: skip
Component = Literal["process", "device", "node", "link", "script"]
Tie = Literal["", "network", "storage", "memory", "moment", "silence", "nothing"]
"""Condition under which a line about a part of a node can explain the end of a process (`ties`). "": none. "network": a
lost connection. "storage": a file error. "memory": a memory error or a kill. "moment": the line was written shortly
before the end. "silence": as "moment", and no rank logged a reason of its own. "nothing": it never explains an end."""


class Depth(IntEnum):
    """Distance of a line from the root cause. Of lines with about the same time, the one with the lowest depth is
    chosen."""

    NAMED = 0
    """The kernel, a driver or Slurm names the failed part."""
    REPORTED = 1
    """A library or the kernel reports a specific error."""
    RAISED = 2
    """The program raised an exception of its own."""
    EXIT = 3
    """The exit status of a process, without another reason."""
    SIGN = 4
    """A problem that ends no process by itself, or has several possible causes."""
    TRANSFER = 5
    """A problem of a connection: the other end, or the path to it, may have failed."""
    AFTER = 6
    """A consequence of the end of another process."""


class Defaults(msgspec.Struct, frozen=True):
    """Default values of the rows of a category."""

    component: Component
    blames: bool
    certainty: float
    advice: str


CATEGORY_DEFAULTS: Mapping[Category, Defaults] = {
    "device": Defaults("device", True, 0.9, "drain the node, then dcgmi diag -r 3"),
    "link": Defaults("link", False, 0.6, "ibstat, ibdiagnet or ethtool -S at both ends; check cable and switch port"),
    "node": Defaults(
        "node", True, 0.9, "drain the node, then read dmesg -T and the BMC's event log (ipmitool sel list)"
    ),
    "memory": Defaults("process", False, 0.9, "ask for more memory (--mem), or use less in the program"),
    "storage": Defaults(
        "process", False, 0.8, "df -h and df -i of the folder on that node; ask the storage's operators"
    ),
    "service": Defaults(
        "process", False, 0.8, "see whether the service answers, and can be reached from that node (curl -v URL)"
    ),
    "program": Defaults("script", False, 0.8, "fix the training script; the worker's log has the traceback"),
    "allocation": Defaults("process", False, 0.9, "sacct -j JOB --format=State,ExitCode,DerivedExitCode,Comment"),
    "secondary": Defaults("link", False, 0.0, "look at the rank that ended first"),
    "unknown": Defaults("process", False, 0.3, "read the end of the worker's log, and dmesg -T on the node"),
}


class Signature(msgspec.Struct, frozen=True):
    """A kind of line, and its meaning; a row of `SIGNATURES`.

    `words`: rest of a sentence that begins with the failed rank or node, with named groups of the pattern in braces.
    `needles`: literals of which a line contains one; `pattern`: confirms the line, None if the needle suffices.
    `component`: the failed component; `blames`: whether the node is at fault; `certainty`: of the category, 0 to 1.
    `raised`: whether only the last line of a Python traceback counts. `node_wide`: whether the kernel or Slurm writes
    the line, not the process that it concerns. `tie`: condition under which the line can explain an end.
    """

    kind: str
    category: Category
    depth: Depth
    words: str
    needles: tuple[str, ...]
    pattern: re.Pattern[str] | None
    component: Component
    blames: bool
    certainty: float
    advice: str
    raised: bool = False
    node_wide: bool = False
    tie: Tie = ""
    preceding: re.Pattern[str] | None = None
    """Pattern that is searched in the preceding lines, for named groups that the line itself lacks."""


def _row(
    kind: str,
    category: Category,
    depth: Depth,
    words: str,
    needles: str | tuple[str, ...],
    pattern: str = "",
    *,
    component: Component | None = None,
    blames: bool | None = None,
    certainty: float | None = None,
    advice: str | None = None,
    raised: bool = False,
    tie: Tie = "",
    preceding: str = "",
) -> Signature:
    default = CATEGORY_DEFAULTS[category]
    return Signature(
        kind=kind,
        category=category,
        depth=depth,
        words=words,
        needles=(needles,) if isinstance(needles, str) else needles,
        pattern=re.compile(pattern) if pattern else None,
        component=component or default.component,
        blames=default.blames if blames is None else blames,
        certainty=default.certainty if certainty is None else certainty,
        advice=default.advice if advice is None else advice,
        raised=raised,
        tie=tie,
        preceding=re.compile(preceding) if preceding else None,
    )


NAMED, REPORTED, RAISED, SIGN, TRANSFER, AFTER = (
    *(Depth.NAMED, Depth.REPORTED, Depth.RAISED, Depth.SIGN, Depth.TRANSFER, Depth.AFTER),
)
_BUS = r"(?:PCI:)?(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})"
_PROCESS = r"(?P<pid>\d{1,10})"
_FABRIC = "systemctl status nvidia-fabricmanager on the node"
_OOM = "torch.cuda.memory_summary(); smaller micro-batches, more pipeline stages or recomputation"
_OTHER_PORT = (
    "ss -ltnp on the node shows the process that holds the port; let the system choose one (port 0), or name another"
)
_SHM = "df -h /dev/shm on the node; a larger /dev/shm, or fewer DataLoader workers"
_BAD_ACCESS = "run again with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer; if it repeats on this GPU: dcgmi diag -r 3"

_AER = ("AER: Uncorrect", "AER: Multiple Uncorrect", "severity=Uncorrect")
_APEI = "[Hardware Error]: event severity:"
_MACHINE_CHECK = ("Machine Check Exception", "Machine Check:")
_UNCORRECTED = r"[2367abef][0-9a-f]{15}\b"
"""Status of a machine-check bank with bit 61 set (UC): not corrected."""
_LOCAL_DISK = r"(?!(?:fd|sr|loop|nbd|rbd|drbd|ram|zram)\d)\w"
"""Beginning of a block device name of a disk in this node: no floppy, CD, file, network or memory device."""
_NODES = r"[\w.-]{1,64}(?:[\w.,\[\]-]{0,400}[\w\]])?"
"""A node, or a list of nodes as Slurm abbreviates it: `gpu-[18-19]`."""
_BEHIND_A_RANK = r"(?:\[?[\w<>,]{1,24}\]?: ?){0,2}"

_KERNEL = (
    _row("xid", "device", NAMED, "", "NVRM: Xid (",
        rf"Xid \({_BUS}[^)]{{0,48}}\): (?P<xid>\d{{1,4}})\b(?:, pid=['\"]?(?P<pid>\d{{1,10}})\b)?"),
    _row("sxid fatal", "link", NAMED, "NVSwitch reported a fatal error (SXid {sxid})", "SXid (",
        rf"SXid \({_BUS}[^)]{{0,48}}\): (?P<sxid>\d{{1,6}}), Fatal", blames=True, certainty=0.9, advice=_FABRIC),
    _row("sxid", "link", SIGN, "NVSwitch reported an error (SXid {sxid})", "SXid (",
        rf"SXid \({_BUS}[^)]{{0,48}}\): (?P<sxid>\d{{1,6}})", advice=_FABRIC),
    _row("gpu off the bus", "device", NAMED, "GPU has fallen off the bus", "fallen off the bus",
        rf"NVRM: .{{0,40}}{_BUS}|NVRM: .{{0,80}}fallen off", preceding=rf"NVRM: The NVIDIA GPU {_BUS}",
        advice="drain the node, power-cycle it, then dcgmi diag -r 3"),
    _row("gpu initialisation", "device", NAMED, "GPU could not be initialised by its driver", "RmInitAdapter failed",
        rf"NVRM: GPU {_BUS}"),
    _row("row remapping", "device", NAMED, "GPU could not remap a row of its memory", "Row Remapper: Error"),
    _row("pcie fatal", "node", NAMED, "PCIe reported an uncorrected error", _AER, r"Uncorrect(?:ed|able) \(Fatal",
        tie="moment"),
    _row("pcie non-fatal", "node", SIGN, "PCIe reported a non-fatal error", _AER,
        r"Uncorrect(?:ed|able) \(Non-Fatal", blames=False, certainty=0.3, tie="silence"),
    _row("machine check", "node", NAMED, "CPU or memory reported an uncorrected hardware error", _MACHINE_CHECK,
        rf"Machine Check(?: Exception)?: [0-9a-f]{{1,16}} Bank \d{{1,3}}: {_UNCORRECTED}"),
    _row("hardware error", "node", NAMED, "hardware reported an uncorrected error", _APEI, "severity: fatal",
        tie="moment"),
    _row("hardware error handled", "node", SIGN, "hardware reported an error that the kernel could handle", _APEI,
        "severity: recoverable", blames=False, certainty=0.3, tie="silence"),
    _row("uncorrected memory", "node", NAMED, "host memory had an uncorrected error", "EDAC MC",
        r"EDAC MC\d{1,3}: \d{1,9} UE "),
    _row("poisoned memory", "node", NAMED, "host memory had an uncorrected error", "due to hardware memory corruption",
        rf"(?:to|Killing) [^:]{{1,32}}:{_PROCESS}"),
    _row("corrected memory", "node", SIGN, "host memory had corrected errors", "EDAC MC",
        r"EDAC MC\d{1,3}: \d{1,9} CE ", blames=False, certainty=0.2, tie="silence"),
    _row("machine checks logged", "node", SIGN, "CPU or memory logged hardware errors", (
        "Machine check events logged", *_MACHINE_CHECK), blames=False, certainty=0.3, tie="silence"),
    _row("kernel panic", "node", NAMED, "kernel panicked", "Kernel panic - not syncing"),
    _row("overheated", "node", NAMED, "shut down at its critical temperature", "critical temperature reached"),
    _row("cpu throttled", "node", SIGN, "CPU was throttled at its temperature limit", "temperature above threshold",
        blames=False, certainty=0.4, advice="check fans and air flow of the node; turbostat"),
    _row("soft lockup", "node", SIGN, "a CPU was stuck in the kernel", "BUG: soft lockup", certainty=0.5,
        tie="moment"),
    _row("blocked task", "storage", SIGN, "a process waited for disk or file system for minutes",
        "blocked for more than", rf"task [^:]{{1,32}}:{_PROCESS} blocked", certainty=0.4),
    _row("memory cgroup", "memory", NAMED, "killed by the kernel: its memory limit was reached",
        ("Memory cgroup out of memory", "oom-kill:constraint="),
        rf"(?:of memory.{{0,40}}: (?:OOM k|K)ill(?:ed)? process |CONSTRAINT_MEMCG.{{0,400}},pid=){_PROCESS}",
        tie="memory"),
    _row("host memory", "memory", NAMED, "killed by the kernel: the node was out of memory",
        ("Out of memory: Kill", "Out of memory (oom_kill", "oom-kill:constraint="),
        rf"(?:of memory.{{0,40}}: Kill(?:ed)? process |CONSTRAINT_(?!MEMCG).{{0,400}},pid=){_PROCESS}",
        advice="ask for the node's memory as a whole (--mem=0 --exclusive), or use less", tie="memory"),
    _row("kernel segfault", "program", REPORTED, "ended by a segmentation fault", "segfault at ",
        rf"\[{_PROCESS}\]: segfault at", component="process", certainty=0.5,
        advice="PYTHONFAULTHANDLER=1 shows where; if it repeats on this node: dcgmi diag -r 3"),
    _row("kernel trap", "program", REPORTED, "ended by a processor exception", ("general protection",
        "trap invalid opcode"), rf"\[{_PROCESS}\]", component="process", certainty=0.5),
    _row("port down", "link", NAMED, "network port went down", ("Link down", "NIC Link is",
        "link status definitely down", "Cable unplugged"), r"mlx5|NIC Link is [Dd]own|bond\w{0,8}: |Port module",
        blames=True, certainty=0.8, tie="network"),
    _row("nic failure", "link", NAMED, "network adapter failed", "mlx5_core",
        r"health compromised|reached miss count|leak of a command|Port module event\[error\]|ealth poll failed|synd 0x",
        blames=True, certainty=0.9, advice="drain the node; mlxfwreset or power-cycle, then ibdiagnet", tie="network"),
    _row("nic stuck", "link", NAMED, "network adapter stopped sending", "NETDEV WATCHDOG", blames=True, certainty=0.7,
        tie="network"),
    _row("disk failure", "storage", NAMED, "a disk of the node failed", ("I/O error, dev ", "Buffer I/O error on dev",
        "controller is down; will reset"), rf"on dev(?:ice)? {_LOCAL_DISK}|error, dev {_LOCAL_DISK}|is down; will",
        component="node", blames=True, certainty=0.9,
        advice="drain the node; smartctl -a or nvme smart-log of the disk", tie="storage"),
    _row("file system damaged", "storage", NAMED, "a file system of the node is damaged", ("EXT4-fs error",
        "Corruption detected. Unmount"), rf"\(device {_LOCAL_DISK}|XFS \({_LOCAL_DISK}", component="node", blames=True,
        certainty=0.8, advice="drain the node and run fsck", tie="storage"),
    _row("file server silent", "storage", NAMED, "a file server does not answer", ("nfs: server ", "LustreError: ",
        "in progress operations using this service"), r"not responding|LustreError: |Lustre: ", tie="storage"),
    _row("link recovered", "link", SIGN, "network port was down for a while", (), blames=False, certainty=0.3,
        tie="network"),
    _row("storage recovered", "storage", SIGN, "a disk or file server did not answer for a while", (), certainty=0.3,
        tie="storage"),
    _row("pcie recovered", "node", SIGN, "PCIe reported an error and recovered", (), blames=False, certainty=0.0,
        tie="nothing"),
)  # fmt: skip

_SLURM = (
    _row("time limit", "allocation", NAMED, "reached its time limit", "DUE TO TIME LIMIT",
        advice="a longer --time, or requeue (resihp resumes from the last checkpoint)"),
    _row("preempted", "allocation", NAMED, "preempted by Slurm", "DUE TO PREEMPTION",
        advice="requeue, or a partition or QOS that is not preempted"),
    _row("node failure", "node", NAMED, "Slurm lost the node", ("DUE TO NODE FAILURE", "Node failure on "),
        rf"NODE FAILURE|failure on (?P<node>{_NODES})", advice="scontrol show node; slurmctld's log gives the reason"),
    _row("slurm oom", "memory", NAMED, "killed at the memory limit of its Slurm step", ("oom_kill event",
        "oom-kill event", ": Out Of Memory", " memory limit (", "cgroup out-of-memory handler"),
        r"Detected [1-9]\d{0,8} oom.kill|tasks? [\d,-]{1,64}: Out Of Memory|"
        r"^(?!.{0,200}Detected 0).{0,300}cgroup out-of-memory|"
        r"exceeded (?:virtual |job |step )?memory limit \([^)]{1,64}\), being killed", tie="memory"),
    _row("memory limit reached", "memory", SIGN, "reached the memory limit of its Slurm step", ("memory limit at some",
        "limit at least once"), r"[Ee]xceeded (?:job|step) memory limit at some|hit memory(?:\+swap)? limit at least",
        certainty=0.4),
    _row("unkillable", "node", SIGN, "its processes did not end when Slurm killed them", "STEPD TERMINATED ON",
        r"TERMINATED ON (?P<node>[\w.-]{1,64}) AT .{1,40}NOT ENDING WITH SIGNALS", blames=False, certainty=0.4,
        advice="ps -eo pid,stat,wchan:32,cmd on the node shows processes in state D; dmesg -T the cause of the wait"),
    _row("gpus missing", "node", NAMED, "has fewer GPUs than Slurm is configured for ({counts})",
        ("count reported lower", "count too low"),
        rf"(?:(?:node|NodeName=) ?(?P<node>{_NODES}) .{{0,80}})?gres/gpu\S{{0,64}} count "
        r"(?:reported lower than configured|too low) \((?P<counts>\d{1,4} < \d{1,4})\)", certainty=0.8,
        advice="nvidia-smi -L and dmesg -T on the node; after the repair scontrol update NodeName=NODE State=RESUME"),
    _row("srun ports", "allocation", REPORTED, "srun could not open a port ({why})", "slurm_init_msg_engine_port",
        r"slurm_init_msg_engine_ports? error:? ?(?P<why>[^\n]{1,80})", certainty=0.7,
        advice="ss -tan on that node shows which ports are taken; a larger SrunPortRange in slurm.conf"),
    _row("nodes left out", "allocation", SIGN, "srun left out nodes: its list names more than it may use ({counts})",
        "Required nodelist includes more nodes", r"max-node count \((?P<counts>\d{1,6} > \d{1,6})\)", certainty=0.5,
        advice="make --nodes and --nodelist of the step agree"),
    _row("epilog", "unknown", SIGN, "Slurm's epilog failed after the job ({why})", "epilog: error: ",
        r"epilog: error: (?P<why>[^\n]{1,160})", certainty=0.2,
        advice="tell the site's operators; the epilog runs after the job and did not end it"),
    _row("container", "unknown", SIGN, "its container could not be set up ({why})", ("error: pyxis: ", "spank_pyxis"),
        r"(?:error: pyxis: |spank_)(?P<why>[^\n]{1,160})", certainty=0.5,
        advice="read enroot's lines beside it; its folders on that node (ENROOT_DATA_PATH) have to be writable"),
    _row("cancelled", "allocation", TRANSFER, "cancelled", "CANCELLED AT ", certainty=0.6),
    _row("task ended", "secondary", AFTER, "Slurm reported an end", ("srun: error: ", "srun: Job step aborted",
        "srun: Terminating StepId"), r"error: \S{1,64}: tasks? |srun: (?:Job step aborted|Terminating)"),
)  # fmt: skip

_CUDA = (
    _row("cuda ecc", "device", REPORTED, "GPU memory had an uncorrectable error",
        ("uncorrectable ECC error encountered",
        "CUDA_ERROR_ECC_UNCORRECTABLE")),
    _row("cuda nvlink", "link", REPORTED, "NVLink had an uncorrectable error", ("uncorrectable NVLink error",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE", "GPU memory over nvlink"), blames=True, certainty=0.8,
        advice="drain the node; nvidia-smi nvlink -e, dcgmi diag -r 3"),
    _row("gpu lost", "device", REPORTED, "GPU is lost to its driver", ("GPU is lost",
        "Unable to determine the device handle")),
    # A wrong CUDA_VISIBLE_DEVICES hides all devices as well.
    _row("no gpu", "unknown", REPORTED, "sees no GPU", ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device",
        "No CUDA GPUs are available"), component="device", certainty=0.5,
        advice="compare CUDA_VISIBLE_DEVICES of the worker with nvidia-smi -L on the node"),
    _row("gpu busy", "device", REPORTED, "GPU is held by another process", ("busy or unavailable",
        "CUDA_ERROR_DEVICE_UNAVAILABLE"), r"CUDA|cuda|Cuda", blames=False, certainty=0.6,
        advice="nvidia-smi on the node shows the processes that hold the GPU; end those of an earlier job"),
    _row("fabric manager", "node", REPORTED, "NVSwitch fabric is not configured", ("system not yet initialized",
        "CUDA_ERROR_SYSTEM_NOT_READY"), advice=_FABRIC),
    _row("driver mismatch", "node", REPORTED, "driver and libraries of NVIDIA are of different versions",
        "Driver/library version mismatch", advice="drain the node, reboot it, or reload the driver"),
    _row("driver too old", "program", REPORTED, "the program's CUDA is newer than the node's driver", (
        "CUDA driver version is insufficient", "NVIDIA driver on your system is too old"),
        advice="nvidia-smi on the node shows the CUDA that its driver supports; install a torch built for it"),
    _row("nvml unknown", "device", REPORTED, "GPU is not visible to its driver",
        ("Failed to initialize NVML: Unknown Error", "NVML: GPU is lost"), blames=False, certainty=0.6,
        advice="nvidia-smi on the node, outside of any container; a container may have lost its devices"),
    _row("illegal access", "program", REPORTED, "GPU memory was accessed illegally",
        ("an illegal memory access was encountered", "CUDA_ERROR_ILLEGAL_ADDRESS"), advice=_BAD_ACCESS),
    _row("device assert", "program", REPORTED, "an assertion failed in a kernel of the program",
        ("device-side assert triggered", "CUDA_ERROR_ASSERT", "Assertion `"), r"assert triggered|_ASSERT|thread: \[",
        certainty=0.95, advice="an index out of range, as a rule: run again with CUDA_LAUNCH_BLOCKING=1"),
    _row("launch failure", "program", REPORTED, "a kernel crashed on the GPU", ("unspecified launch failure",
        "CUDA_ERROR_LAUNCH_FAILED"), certainty=0.6, advice=_BAD_ACCESS),
    _row("bad kernel", "program", REPORTED, "a kernel used a misaligned address or an illegal instruction", (
        "misaligned address", "an illegal instruction was encountered", "invalid program counter",
        "hardware stack error", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_ILLEGAL_INSTRUCTION"), r"CUDA|[Cc]uda",
        certainty=0.6, advice=_BAD_ACCESS),
    _row("launch timeout", "device", REPORTED, "a kernel did not end in time",
        ("the launch timed out and was terminated",
        "CUDA_ERROR_LAUNCH_TIMEOUT"), blames=False, certainty=0.5),
    _row("no kernel", "program", REPORTED, "the program was built for another GPU", ("no kernel image is available",
        "CUDA_ERROR_NO_BINARY_FOR_GPU", "invalid device function"),
        advice="rebuild it with this GPU in TORCH_CUDA_ARCH_LIST"),
    _row("gpu memory", "memory", REPORTED, "GPU memory was exhausted", ("CUDA out of memory",
        "CUDA error: out of memory",
        "CUDA_ERROR_OUT_OF_MEMORY", "'out of memory'", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
        "CUDA driver error: out of memory", "[CUDA]: out of memory", "HIP out of memory",
        "cudaErrorMemoryAllocation", "cupy.cuda.memory.OutOfMemoryError",
        "RESOURCE_EXHAUSTED: Out of memory", "OutOfMemoryError"),
        r"(?i:CUDA|HIP) (?:out of mem|error|driver error)|CUDA\]|CUDA_E|cudaErrorM|cupy|'out of|ALLOC_F|RESOURCE_E|"
        r"(?:\btorch[\w.]{0,24}\.|\()OutOfMemoryError\)?:", advice=_OOM),
    _row("cuda libraries", "unknown", SIGN, "a CUDA library failed", ("CUBLAS_STATUS_", "CUDNN_STATUS_",
        "CUSOLVER_STATUS_", "CUFFT_STATUS_"),
        advice="often too little GPU memory; run again with CUDA_LAUNCH_BLOCKING=1"),
    _row("cuda error", "unknown", SIGN, "a call of CUDA failed", ("CUDA error: ", "Cuda failure ", "CUDA_ERROR_"),
        advice="run again with CUDA_LAUNCH_BLOCKING=1; dmesg -T on the node shows Xids"),
)  # fmt: skip

_FATAL = r"\b(?:port error|(?:device|QP|WQ) fatal|CQ error|catastrophic error|local work queue|local access violation)"
"""Those words of `ibv_event_type_str` after which an adapter, a port or a queue pair does not work."""
_IB = r"(?:from peer (?P<peer>[^\s<]{1,64})\S{0,16} )?with (?:status=|error )(?:\w{1,32}\()?"
_NCCL = (
    _row("ib flushed", "secondary", AFTER, "work requests were flushed after an error", "Got completion",
        rf"{_IB}5\b|vendor err 249"),
    _row("ib retry exceeded", "link", TRANSFER, "transfers to its peer were not acknowledged", "Got completion",
        rf"{_IB}1[23]\b|vendor err 129"),
    _row("ib completion", "link", TRANSFER, "a transfer failed", ("NET/IB : Got completion", "NET/IB: Got completion")),
    _row("ib event", "link", REPORTED, "network adapter reported an error", ("sync event", "sync fatal event"),
        rf"(?i)\basync fatal event(?! on SRQ)|\basync event.{{0,24}}?{_FATAL}",
        blames=True, certainty=0.7, tie="network"),
    _row("ib no path", "link", TRANSFER, "no connection to its peer could be made", ("ibv_modify_qp failed",
        "NET/OFI Request", "No route to host", "Network is unreachable")),
    _row("ib locked memory", "memory", REPORTED, "no memory could be registered with the network adapter",
        ("ibv_reg_mr",
        "ibv_create_cq"), "Cannot allocate memory", advice="ulimit -l unlimited for slurmd (LimitMEMLOCK=infinity)"),
    _row("shm full", "memory", REPORTED, "/dev/shm is full", ("/dev/shm", "shared memory", "</torch_",
        "posix_fallocate"),
        r"No space left on device|failed to extend /dev/shm|insufficient shared memory|out of shared memory|"
        r"unable to write to file </torch_|while creating shared memory segment",
        advice=_SHM),
    _row("nccl usage", "program", REPORTED, "NCCL was used wrongly", ("ncclInvalidUsage", "ncclInvalidArgument")),
    _row("collective mismatch", "program", REPORTED, "ranks called different collectives",
        ("Detected mismatch between collectives", "ran into a mismatch of collectives")),
    _row("ras mismatch", "unknown", SIGN, "ranks were at different collectives (NCCL RAS)", "ommunicator ranks have",
        r"ranks have different (?:\w{1,24} operation counts|status)", certainty=0.4,
        advice="the ranks that RAS names below it are ahead or behind: look at their logs, or py-spy dump of both"),
    _row("watchdog stuck", "unknown", SIGN, "its NCCL watchdog was stuck in a call of NCCL or CUDA",
        ("watchdog got stuck for", "due to ProcessGroupNCCL watchdog hang"),
        r"got stuck for|Terminating the process", certainty=0.4,
        advice="py-spy dump of a rank that hangs; nvidia-smi and dmesg -T on its node"),
    _row("watchdog", "secondary", AFTER, "waited in vain for its peers in a collective",
        ("Watchdog caught collective operation timeout", "Some NCCL operations have failed or timed out",
        "detected by watchdog at work", "Timeout at NCCL work", "due to a collective timeout",
        "Heartbeat monitor timed out", "watchdog thread terminated with exception",
        "we are taking the entire process down")),
    _row("nccl remote", "secondary", AFTER, "lost a peer (NCCL remote error)", ("ncclRemoteError",
        "remote process exited or there was a network error", "NCCL communicator was aborted")),
    _row("nccl system", "link", SIGN, "NCCL failed in a system call", ("ncclSystemError", "unhandled system error"),
        certainty=0.4, advice="run again with NCCL_DEBUG=WARN"),
    _row("nccl cuda", "unknown", SIGN, "NCCL failed in a call of CUDA", ("ncclUnhandledCudaError",
        "unhandled cuda error"), advice="run again with NCCL_DEBUG=WARN; dmesg -T on the node shows Xids"),
    _row("nccl internal", "unknown", SIGN, "NCCL failed", ("ncclInternalError",
        "internal error - please report this issue to the NCCL")),
)  # fmt: skip

_HOST = (
    _row("loader bus error", "memory", REPORTED, "a DataLoader worker found /dev/shm full", "DataLoader worker (pid",
        "Bus error", advice=_SHM),
    _row("loader segfault", "program", REPORTED, "a DataLoader worker crashed", "DataLoader worker (pid",
        "Segmentation fault|Aborted"),
    _row("loader killed", "memory", REPORTED, "a DataLoader worker was killed, most likely for memory",
        "DataLoader worker (pid", "killed by signal: Killed", certainty=0.7),
    _row("loader ended", "unknown", SIGN, "a DataLoader worker ended", "DataLoader worker (pid", "exited unexpectedly"),
    _row("disk full", "storage", REPORTED, "a disk is full", ("No space left on device", "Errno 28"), certainty=0.9),
    _row("quota", "storage", REPORTED, "a disk quota is used up", ("Disk quota exceeded", "Errno 122"),
        advice="quota -s, or lfs quota, of the folder's owner"),
    _row("stale handle", "storage", REPORTED, "a file handle went stale (network file system)", (
        "Stale file handle", "Errno 116"), advice="mount and stat of the folder on that node; remount it"),
    _row("io error", "storage", REPORTED, "reading or writing a file failed", ("Input/output error", "Errno 5]",
        "Remote I/O error", "Errno 121")),
    _row("mount gone", "storage", REPORTED, "a file system is gone or read-only",
        ("Transport endpoint is not connected",
        "Read-only file system"), advice="mount and dmesg -T on that node; remount it"),
    _row("broken file", "storage", REPORTED, "a file is incomplete", ("failed reading zip archive",
        "failed writing file",
        "The file might be corrupted", "unexpected EOF, expected", "MetadataIncompleteBuffer",
        "pickle data was truncated")),
    _row("no host memory", "memory", REPORTED, "host memory was exhausted", ("DefaultCPUAllocator: can't allocate",
        "DefaultCPUAllocator: not enough", "std::bad_alloc", "MemoryError", "Cannot allocate memory"),
        r"(?<!\w)(?!OutOfMemoryError: out of resource)\w{0,40}MemoryError\b|Default|bad_alloc|Cannot allocate"),
    _row("open files", "program", REPORTED, "too many files were open", ("Too many open files", "items of ancdata"),
        advice="ulimit -n on the nodes, or fewer files"),
    _row("port in use", "program", REPORTED, "the port it tried to listen on is already in use",
        ("Address already in use",
        "EADDRINUSE", "another process is utilizing it"), component="process", advice=_OTHER_PORT),
    _row("heap", "program", REPORTED, "the program damaged its own memory", ("double free or corruption",
        "free(): invalid",
        "malloc(): ", "corrupted size vs"), component="process"),
    # faulthandler says "Aborted" of any abort, and so of NCCL's watchdog: that is how it ended, not the cause.
    _row("fatal python", "program", REPORTED, "the interpreter crashed", "Fatal Python error: ",
        "Fatal Python error: (?!Aborted)", component="process", certainty=0.5),
)  # fmt: skip

_SECONDARY = (
    _row("peer closed", "secondary", AFTER, "lost the connection to a peer", ("Connection closed by peer",
        "Connection closed by remote", "Connection reset by peer", "Connection was likely closed",
        "Application timeout caused pair closure", "Broken pipe", "Connection refused", "Connection aborted")),
    _row("peer silent", "secondary", AFTER, "waited in vain for a peer", ("for recv operation to complete",
        "for send operation to complete", "waiting for clients", "Socket Timeout", "wait timeout after",
        "client socket has timed out", "connectFullMesh failed", "in store based barrier", "RendezvousTimeoutError",
        "failed to pass monitoredBarrier", "monitoredBarrier, but received errors")),
    _row("interrupted transfer", "secondary", AFTER, "stopped waiting on request", "CommunicatorError"),
    _row("launcher", "secondary", AFTER, "its launcher reported an end", ("ChildFailedError", "closing signal SIGTERM",
        "failed (exitcode:")),
)  # fmt: skip

_PROGRAM = (
    _row("not a number", "program", RAISED, "loss or gradient is not a number", ("oss is NaN", "oss is nan",
        "found NaN in", "found Inf in", "Unexpected result nan", "Unexpected result inf", "NaN found in input tensor"),
        r"oss is N|oss is n|found (?:NaN|Inf) in|Unexpected result|(?:Error|Rank \d{1,6}\]).{0,24} NaN found",
        advice="compare with other ranks at the same weights and samples: a single deviating GPU computes wrongly"),
    _row("shapes", "program", RAISED, "raised {error}", ("shapes cannot be multiplied", "size mismatch for",
        "The size of tensor a", "Sizes of tensors must match", "is invalid for input of size", "shape mismatch"),
        raised=True),
    _row("not python", "program", RAISED, "raised {error}", ("SyntaxError: ", "IndentationError: ", "TabError: "),
        rf"^{_BEHIND_A_RANK}(?P<error>(?:Syntax|Indentation|Tab)Error: .{{1,160}})"),
    _row("arguments", "program", RAISED, "{error}", ".py: error: ",
        rf"^{_BEHIND_A_RANK}(?P<error>[\w./-]{{1,80}}\.py: error: .{{1,160}})",
        advice="correct the arguments of the script; it prints its usage above that line"),
    _row("import", "program", RAISED, "raised {error}", ("ImportError", "ModuleNotFoundError"), raised=True,
        advice="compare the environment and its mounts with a node where it works"),
    _row("file missing", "program", RAISED, "raised {error}", ("FileNotFoundError", "PermissionError",
        "NotADirectoryError"), raised=True, advice="ls -l of the path on that node, and on one where it works"),
    _row("interrupted", "allocation", RAISED, "interrupted from the keyboard", "KeyboardInterrupt", raised=True),
    _row("storage failed", "storage", REPORTED, "raised {error}", (), raised=True,
        advice="df, mount and stat of the path on that node; ask the storage's operators"),
    _row("service failed", "service", REPORTED, "raised {error}", (), raised=True),
    _row("connection failed", "program", TRANSFER, "raised {error}", (), raised=True,
        advice="check that the service it connects to runs, and can be reached from that node"),
    _row("exception", "program", RAISED, "raised {error}", "", raised=True),
)  # fmt: skip

SIGNATURES: tuple[Signature, ...] = (
    *(msgspec.structs.replace(row, node_wide=True) for row in (*_KERNEL, *_SLURM)),
    *(*_CUDA, *_NCCL, *_HOST, *_SECONDARY, *_PROGRAM),
)
KERNEL_KINDS = frozenset(row.kind for row in _KERNEL)
"""Kinds of lines that only the kernel writes; in a program's log they are quotations."""
_BY_KIND = {signature.kind: signature for signature in SIGNATURES}
EXCEPTION, CONNECTION_FAILED, PEER_CLOSED = (_BY_KIND[k] for k in ("exception", "connection failed", "peer closed"))
FILE_MISSING, STORAGE_FAILED, SERVICE_FAILED, NO_GPU = (
    _BY_KIND[kind] for kind in ("file missing", "storage failed", "service failed", "no gpu")
)
USUALLY_THE_PROGRAM = frozenset(
    {
        "illegal access",
        "launch failure",
        "bad kernel",
        "kernel segfault",
        "kernel trap",
        "fatal python",
        "xid 13",
        "xid 31",
    }
    | {"exit -4", "exit -7", "exit -8", "exit -11"}
)
"""Kinds of failures that the application usually causes; if they repeat on one device, that device is the cause."""


def _of_xid(xid: Xid) -> Signature:
    link = "NVLINK" in xid.mnemonic
    category: Category = "link" if link else "device"
    if xid.role == "program" or xid.role == "secondary":
        category = xid.role
    role_blames = xid.role in ("device", "link")
    row = _row(
        f"xid {xid.code}",
        category,
        {"sign": SIGN, "secondary": AFTER, "notice": AFTER}.get(xid.role, NAMED),
        f"{xid.description} (Xid {xid.code})",
        (),
        blames=role_blames,
        certainty={"device": 0.95, "link": 0.9, "program": 0.7, "sign": 0.5}.get(xid.role, 0.0),
        advice="",
    )
    return msgspec.structs.replace(row, node_wide=True)


_XIDS = {f"xid {code}": _of_xid(xid) for code, xid in XIDS.items()}


def xid_of(code: int) -> Xid:
    """Return the row of an Xid code; for a code that NVIDIA's catalogue lacks, a row with the role `sign`."""
    return XIDS.get(code) or Xid(code, "", "an Xid that NVIDIA's catalogue does not list", "", "sign")


def signature_of(kind: str) -> Signature | None:
    """Return the row of a kind of clue, including Xids such as `xid 79`; None for an unknown kind of another
    version."""
    signature = _BY_KIND.get(kind) or _XIDS.get(kind)
    if signature is None and kind.startswith("xid ") and kind[4:].isascii() and kind[4:].isdigit():
        return _of_xid(xid_of(int(kind[4:])))
    return signature
