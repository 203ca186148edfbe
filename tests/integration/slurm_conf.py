"""The configuration of a test cluster: everything under one folder, nothing of the machine, impatient. Pure but for
the pretended devices. Used by `tests.integration.cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

NAME = "resihp-test"


def usual(folder: Path, host: str, port: int) -> dict[str, str]:
    """Lines of slurm.conf by key; `host` and `port` are slurmctld's."""
    return {
        "ClusterName": NAME,
        "SlurmctldHost": host,
        "SlurmctldPort": str(port),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": f"socket={folder}/run/munge",
        "SlurmctldPidFile": f"{folder}/run/slurmctld.pid",
        "SlurmdPidFile": f"{folder}/run/slurmd.%n.pid",
        "SlurmctldLogFile": f"{folder}/log/slurmctld.log",
        "SlurmdLogFile": f"{folder}/log/slurmd.%n.log",
        "SlurmdSpoolDir": f"{folder}/spool/%n",
        "StateSaveLocation": f"{folder}/state",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "MpiDefault": "none",
        "JobAcctGatherType": "jobacct_gather/none",
        "AccountingStorageType": "accounting_storage/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "bf_interval=1,sched_interval=2,batch_sched_delay=0,sched_min_interval=0",
        "GresTypes": "gpu",
        "SlurmdParameters": "config_overrides",
        "PropagateResourceLimits": "NONE",
        "ReturnToService": "1",
        # As impatient as Slurm may be told to be: on a busy machine slurmds took more than 5 s to answer while one was
        # dead.
        "SlurmdTimeout": "10",
        "SlurmctldTimeout": "5",
        "MessageTimeout": "3",
        "TCPTimeout": "1",
        "KillWait": "2",
        "InactiveLimit": "0",
        "BatchStartTimeout": "10",
        "EpilogMsgTime": "10",
        "MinJobAge": "300",
    }


def node(
    name: str,
    *,
    host: str,
    address: str,
    port: int,
    cpus: int,
    memory_mb: int,
    gpus: int,
    gpu_type: str = "",
    features: str = "",
) -> str:
    gres = f" Gres=gpu:{gpu_type + ':' if gpu_type else ''}{gpus}" if gpus else ""
    feature = f" Feature={features}" if features else ""
    where = f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port}"
    return f"{where} CPUs={cpus} RealMemory={memory_mb}{gres}{feature} State=UNKNOWN"


def text(settings: Mapping[str, str], nodes: Iterable[str]) -> str:
    """All of slurm.conf, with one partition of all nodes."""
    partition = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP"
    return "\n".join([*(f"{key}={value}" for key, value in settings.items()), *nodes, partition]) + "\n"


def devices(folder: Path, kinds: Mapping[str, tuple[str, int]]) -> str:
    """All of gres.conf, from (type or nothing, how many GPUs) by node; makes the devices, which are all /dev/null."""
    lines = ["AutoDetect=off"]
    for name, (kind, gpus) in kinds.items():
        for gpu in range(gpus):
            device = folder / f"gpu{gpu}"
            if not device.is_symlink():
                device.symlink_to("/dev/null")
        files = f"gpu[0-{gpus - 1}]" if gpus > 1 else "gpu0"
        typed = f" Type={kind}" if kind else ""
        if gpus:
            lines.append(f"NodeName={name} Name=gpu{typed} File={folder}/{files}")
    return "\n".join(lines) + "\n"
