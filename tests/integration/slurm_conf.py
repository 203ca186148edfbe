"""The configuration of a test cluster: everything under one folder, nothing of the machine, impatient. Pure but for
the pretended devices. Used by `tests.integration.cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def usual(folder: Path, host: str, port: int) -> dict[str, str]:
    """Lines of slurm.conf by key; `host` and `port` are slurmctld's."""
    return {
        "ClusterName": "resihp-test",
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
        # As impatient as Slurm can be told to be.
        "SlurmdTimeout": "5",
        "SlurmctldTimeout": "5",
        "MessageTimeout": "3",
        "TCPTimeout": "1",
        "KillWait": "2",
        "InactiveLimit": "0",
        "BatchStartTimeout": "10",
        "EpilogMsgTime": "10",
        "MinJobAge": "300",
    }


def node(name: str, *, host: str, address: str, port: int, cpus: int, memory_mb: int, gpus: int) -> str:
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    where = f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={port}"
    return f"{where} CPUs={cpus} RealMemory={memory_mb}{gres} State=UNKNOWN"


def text(settings: Mapping[str, str], nodes: Iterable[str]) -> str:
    """All of slurm.conf, with one partition of all nodes."""
    partition = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 State=UP"
    return "\n".join([*(f"{key}={value}" for key, value in settings.items()), *nodes, partition]) + "\n"


def devices(folder: Path, gpus: int) -> str:
    """All of gres.conf; makes the devices, which are all /dev/null."""
    for gpu in range(gpus):
        device = folder / f"gpu{gpu}"
        if not device.is_symlink():
            device.symlink_to("/dev/null")
    names = f"gpu[0-{gpus - 1}]" if gpus > 1 else "gpu0"
    return "AutoDetect=off\n" + (f"Name=gpu File={folder}/{names}\n" if gpus else "")
