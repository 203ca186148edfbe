"""Lists NVIDIA's Xid codes: their meaning, NVIDIA's advice, and the part of the node that is the likely cause.

A table for `signatures`; judges no incident. Code, mnemonic, description and resolution are from NVIDIA's Xid catalogue
(docs.nvidia.com/deploy/xid-errors, column "Immediate Action" for A100 and newer), with descriptions shortened. `role`
is resihp's own assessment:

=========== ========================================================================================================
`device`    the GPU, its memory, its power or its place on the bus: the node is the cause
`link`      NVLink between GPUs, or to a switch
`program`   a kernel or a buffer of the application, according to the catalogue and experience
`sign`      hardware or driver reported something that ends nothing by itself: counts only without a better cause
`secondary` follows from an earlier error: 45 (channels cleaned up), 154 (the recovery action has changed)
`notice`    says nothing about a failure
=========== ========================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

import msgspec

Role = Literal["device", "link", "program", "sign", "secondary", "notice"]


class Xid(msgspec.Struct, frozen=True):
    """One Xid code. `resolution`: NVIDIA's class of immediate action, empty if the catalogue has none."""

    code: int
    mnemonic: str
    description: str
    resolution: str
    role: Role


_TABLE = """\
8,FIFO_ERROR_IDLE_TIMEOUT,GPU stopped processing,RESTART_APP,program
11,GR_ERROR_MISSING_HW,Invalid or corrupted push buffer stream,RESTART_APP,program
13,GR_EXCEPTION,Graphics Engine Exception,RESTART_APP,program
25,GR_ILLEGAL_NOTIFY,Invalid or illegal push buffer stream,RESTART_APP,program
31,FIFO_ERROR_MMU_ERR_FLT,GPU memory page fault,RESTART_APP,program
32,PBDMA_ERROR,Invalid or corrupted push buffer stream,RESTART_APP,sign
37,FECS_ERR_UNIMP_FIRMWARE_METHOD,Driver firmware error,IGNORE,sign
38,FECS_ERR_WATCHDOG_TIMEOUT,Driver firmware error,IGNORE,sign
39,CE0_ERROR,Copy Engine Exception,RESTART_APP,program
40,CE1_ERROR,Copy Engine Exception,RESTART_APP,program
41,CE2_ERROR,Copy Engine Exception,RESTART_APP,program
43,RESETCHANNEL_VERIF_ERROR,GPU stopped processing,IGNORE,program
44,GR_FAULT_DURING_CTXSW,Graphics Engine fault during context switch,IGNORE,program
45,PREEMPTIVE_REMOVAL,Preemptive cleanup due to previous errors,WORKFLOW_XID_45,secondary
46,GPU_TIMEOUT_ERROR,GPU stopped processing,RESET_GPU,device
48,GPU_ECC_DBE,Double Bit ECC Error,WORKFLOW_XID_48,device
54,SILENT_RUNNING_PWR_REDUCED_CLOCKING,Auxiliary power is not connected to the GPU board,CHECK_MECHANICALS,device
60,SEC2_ERROR,Video processor exception,RESTART_APP,program
62,PMU_HALT_ERROR,Internal micro-controller halt,RESET_GPU,device
63,INFOROM_DRAM_RETIREMENT_EVENT,GPU memory remapping event,IGNORE,sign
64,INFOROM_DRAM_RETIREMENT_FAILURE,GPU memory remapping failure,RESET_GPU,device
66,FECS_ERR_REG_ACCESS_VIOLATION,Illegal access by driver,IGNORE,sign
67,FECS_ERR_VERIF_VIOLATION,Illegal access by driver,IGNORE,sign
68,NVDEC0_ERROR,NVDEC0 Exception,RESTART_APP,program
69,GR_CLASS_ERROR,Graphics Engine class error,RESTART_APP,program
70,CE3_ERROR,CE3: Unknown Error,RESTART_APP,program
71,CE4_ERROR,CE4: Unknown Error,RESTART_APP,program
72,CE5_ERROR,CE5: Unknown Error,RESTART_APP,program
74,NVLINK_ERROR,NVLINK Error,WORKFLOW_NVLINK_ERR,link
75,CE6_ERROR,CE6: Unknown Error,RESTART_APP,program
76,CE7_ERROR,CE7: Unknown Error,RESTART_APP,program
77,CE8_ERROR,CE8: Unknown Error,RESTART_APP,program
78,VGPU_START_ERROR,vGPU Start Error,UPDATE_SWFW,sign
79,GPU_HAS_FALLEN_OFF_THE_BUS,GPU has fallen off the bus,RESTART_BM,device
80,PBDMA_PUSHBUFFER_CRC_MISMATCH,Corrupted data sent to GPU,RESTART_APP,sign
82,NVJPG0_ERROR,NVJPG0 Error,RESTART_APP,program
83,NVDEC1_ERROR,NVDEC1 Error,RESTART_APP,program
84,NVDEC2_ERROR,NVDEC2 Error,RESTART_APP,program
85,CE9_ERROR,CE9: Unknown Error,RESTART_APP,program
86,OFA0_ERROR,OFA Exception,RESTART_APP,program
88,NVDEC3_ERROR,NVDEC3 Error,RESTART_APP,program
89,NVDEC4_ERROR,NVDEC4 Error,RESTART_APP,program
92,EXCESSIVE_SBE_INTERRUPTS,High single-bit ECC error rate,IGNORE,sign
93,INFOROM_ERASE_LIMIT_EXCEEDED,Non-fatal violation of provisioned InfoROM wear limit,IGNORE,notice
94,CONTAINED_ERROR,Contained memory error,RESTART_APP,device
95,UNCONTAINED_ERROR,Uncontained memory error,RESET_GPU,device
96,NVDEC5_ERROR,NVDEC5 Error,RESTART_APP,program
97,NVDEC6_ERROR,NVDEC6 Error,RESTART_APP,program
98,NVDEC7_ERROR,NVDEC7 Error,RESTART_APP,program
99,NVJPG1_ERROR,NVJPG1 Error,RESTART_APP,program
100,NVJPG2_ERROR,NVJPG2 Error,RESTART_APP,program
101,NVJPG3_ERROR,NVJPG3 Error,RESTART_APP,program
102,NVJPG4_ERROR,NVJPG4 Error,RESTART_APP,program
103,NVJPG5_ERROR,NVJPG5 Error,RESTART_APP,program
104,NVJPG6_ERROR,NVJPG6 Error,RESTART_APP,program
105,NVJPG7_ERROR,NVJPG7 Error,RESTART_APP,program
106,SMBPBI_TEST_MESSAGE,SMBPBI Test Message,IGNORE,notice
107,SMBPBI_TEST_MESSAGE_SILENT,SMBPBI Test Message Silent,IGNORE,notice
109,CTXSW_TIMEOUT_ERROR,Context Switch Timeout Error,RESET_GPU,device
110,SEC_FAULT_ERROR,Security Fault Error,RESET_GPU,device
119,GSP_RPC_TIMEOUT,GSP RPC Timeout,RESET_GPU,device
120,GSP_ERROR,GSP Error,RESET_GPU,device
121,C2C_ERROR,C2C Error,IGNORE,sign
126,CE10_ERROR,CE10: Unknown Error,RESTART_APP,program
127,CE11_ERROR,CE11: Unknown Error,RESTART_APP,program
128,CE12_ERROR,CE12: Unknown Error,RESTART_APP,program
129,CE13_ERROR,CE13: Unknown Error,RESTART_APP,program
130,CE14_ERROR,CE14: Unknown Error,RESTART_APP,program
131,CE15_ERROR,CE15: Unknown Error,RESTART_APP,program
132,CE16_ERROR,CE16: Unknown Error,RESTART_APP,program
133,CE17_ERROR,CE17: Unknown Error,RESTART_APP,program
134,CE18_ERROR,CE18: Unknown Error,RESTART_APP,program
135,CE19_ERROR,CE19: Unknown Error,RESTART_APP,program
136,ALI_TRAINING_FAIL,Link Training Failed,RESET_GPU,device
137,NVLINK_PRIV_ERR,NVLink Privilege Error,IGNORE,sign
139,OFA1_ERROR,OFA1 Error,RESTART_APP,program
140,UNRECOVERABLE_ECC_ERROR_ESCAPE,ECC Unrecovered Error,RESET_GPU,device
141,FAST_PATH_ERROR,CUDA Fast Path Error,IGNORE,program
142,NVENC3_ERROR,NVENC3 Error,CONTACT_SUPPORT,program
143,GPU_INIT_ERROR,GPU Initialization Error,RESET_GPU,device
144,NVLINK_SAW_ERROR,NVLINK: SAW Error,WORKFLOW_NVLINK5_ERR,link
145,NVLINK_RLW_ERROR,NVLINK: RLW Error,WORKFLOW_NVLINK5_ERR,link
146,NVLINK_TLW_ERROR,NVLINK: TLW Error,WORKFLOW_NVLINK5_ERR,link
147,NVLINK_TREX_ERROR,NVLINK: TREX Error,WORKFLOW_NVLINK5_ERR,link
148,NVLINK_NVLPW_CTRL_ERROR,NVLINK: NVLPW_CTRL Error,WORKFLOW_NVLINK5_ERR,link
149,NVLINK_NETIR_ERROR,NVLINK: NETIR Error,WORKFLOW_NVLINK5_ERR,link
150,NVLINK_MSE_ERROR,NVLINK: MSE Error,WORKFLOW_NVLINK5_ERR,link
151,KEY_ROTATION_ERROR,Key rotation Error,RESTART_VM,device
152,DLA_SMMU_ERROR,DLA SMMU Error,IGNORE,sign
153,DLA_TIMEOUT,DLA timeout Error,IGNORE,sign
154,GPU_RECOVERY_ACTION_CHANGED,GPU Recovery Action Changed,XID_154,secondary
155,NVLINK_SW_DEFINED_ERROR,NVLINK: SW Defined Error,RESET_GPU,link
156,RESOURCE_RETIREMENT_EVENT,Resource Retirement Event,RESET_GPU,device
157,RESOURCE_RETIREMENT_FAILURE,Resource Retirement Failure,IGNORE,sign
158,GPU_FATAL_TIMEOUT,GPU Fatal Timeout,RESET_GPU,device
159,CHI_NON_DATA_ERROR,CHI Non-Data Error,CHECK_UVM,program
160,CHANNEL_RETIREMENT_EVENT,Channel Retirement Event,IGNORE,sign
161,CHANNEL_RETIREMENT_FAILURE,Channel Retirement Failure,IGNORE,sign
162,PSHC_REENGAGED,Power smoothing reengaged,,notice
163,PSHC_DISENGAGED,Power smoothing disengaged,,notice
164,PSHC_LOW_LIFETIME,Power smoothing circuitry near the end of its lifetime,,sign
165,PSHC_ZERO_LIFETIME,Power smoothing circuitry at the end of its lifetime,,sign
166,NVLINK_SECURE_CRYPTO_ERR,NVLink traffic before its encryption was configured,,link
167,PCIE_FATAL_TIMEOUT,Fatal PCIe timeout,,device
168,REDUCED_GPU_MEMORY_CAPACITY,Errors in the write protected region of memory,,device
169,SEC2_HALT_ERROR,Internal micro-controller halt,,device
170,NVLINK_SECURE_OTHER,NVLink interrupt in confidential-computing mode,,link
171,UNCORRECTABLE_DRAM_ERROR,Uncorrectable DRAM error,,device
172,UNCORRECTABLE_SRAM_ERROR,Uncorrectable SRAM error,,device
"""


def _read(line: str) -> Xid:
    code, mnemonic, description, resolution, role = line.split(",")
    assert role in get_args(Role), line
    return Xid(int(code), mnemonic, description, resolution, cast(Role, role))


XIDS: Mapping[int, Xid] = {xid.code: xid for xid in map(_read, _TABLE.splitlines())}

RESOLUTION_ADVICE: Mapping[str, str] = {
    "RESTART_APP": "start the process again; if it repeats on this GPU: dcgmi diag -r 3",
    "RESET_GPU": "drain the node, then nvidia-smi --gpu-reset -i {bus}",
    "RESTART_BM": "drain the node, power-cycle it, then dcgmi diag -r 3; check seating and power if it repeats",
    "RESTART_VM": "restart the virtual machine",
    "IGNORE": "no action by NVIDIA's catalogue; watch whether it repeats",
    "CHECK_MECHANICALS": "drain the node, check the GPU's power cables and seating",
    "CHECK_UVM": "look for the Xid beside it; if there is none, nvidia-bug-report.sh",
    "UPDATE_SWFW": "update driver and firmware of the node",
    "CONTACT_SUPPORT": "nvidia-bug-report.sh, then ask NVIDIA's support",
    "WORKFLOW_XID_45": "look for the Xid before it",
    "WORKFLOW_XID_48": "drain the node, nvidia-smi --gpu-reset -i {bus}; replace the GPU if Xid 64 or 48 comes back",
    "WORKFLOW_NVLINK_ERR": "drain the node, nvidia-smi nvlink -e, reset all its GPUs; dcgmi diag -r 3 if it repeats",
    "WORKFLOW_NVLINK5_ERR": "drain the node, nvidia-smi nvlink -e, reset all its GPUs; dcgmi diag -r 3 if it repeats",
    "XID_154": "do what the line says: nothing, GPU reset, node reboot, or drain",
}
"""Advice by NVIDIA's class of immediate action; `{bus}` stands for the GPU's PCI address."""


def advice(xid: Xid, bus: str) -> str:
    """Return the advice for an Xid, with the GPU's PCI address filled in."""
    if not xid.resolution and xid.role in ("device", "link"):
        return f"drain the node, dcgmi diag -r 3 for GPU {bus or 'in question'}"
    return RESOLUTION_ADVICE.get(xid.resolution, "nvidia-bug-report.sh").format(bus=bus or "BUS")
