"""Figures of known devices: peak rates of dense matrix products, memory and links, with sources.

Peaks are the vendor's. The fraction that large products reach (`efficiency_percent`) is an assumption; 0.7 to
0.8 is usual in bf16. That of Hopper is fitted on published steps (docs/costs.md). Latencies and all figures
of CPUs are assumptions too. `FIGURE_SOURCES` names the source of each figure.
"""

from __future__ import annotations

from secc.cluster.types import GIB, Device, Link, Overheads

GB = 10**9


# Assumed: the order of magnitude of Python code around a forward or backward on a server core. The GPU
# computes meanwhile, so that most of it is hidden.
GPU_OVERHEADS = Overheads(job=10_000, message=10_000, tensor=500, sample=5_000, step=500_000, label="default")
# Assumed: the order of magnitude seen with small models on one core. `secc profile MODEL.py` measures them.
CPU_OVERHEADS = Overheads(
    job=300_000, message=150_000, tensor=30_000, sample=200_000, step=5_000_000, label="default"
)


# Assumed: kernels multiply tiles of 128 rows, and the last tile of each expert is half empty on average.
EXPERT_LOST_ROWS = 64
# Percent of the peak. Where published steps are priced with the habits of their frameworks, products alone
# reach 81% on A100 and 69% on H100 (docs/costs.md). Those habits (norms that are not fused, products with few
# rows) are not priced for secc's own runtime, so these percentages stand for them, too: predictions over 114
# published A100 steps have a median of 1.01 (`tools.check_published --own-runtime`). Higher ones would make
# them too short. On H100 it is 0.86 for 33 steps of llm-foundry, which used a slow attention kernel.
LARGE_PRODUCT_PERCENT = 70
# Percent of the memory's rate that operations other than products reach. That of Hopper is fitted on steps
# of four layers of Qwen3-8B on one H100 and one H200, with and without fused operators (docs/gpu.md). At the
# full rate they are predicted to take 0.78 to 0.89 of the time that the device computed, at 56% 0.86 to 1.08.
HOPPER_MEMORY_PERCENT = 56
HOPPER_PRODUCT_PERCENT = 60  # fitted on those 33 steps


# Assumed: the part of PCIe's rate that copies of page-locked memory reach.
HOST_COPY_PERCENT = 80
# (GB of host memory for each GPU, GB/s of PCIe in one direction); sources in `FIGURE_SOURCES`.
_DGX_GEN5, _DGX_GEN4 = (256, 64), (256, 32)


def _gpu_device(
    kind: str,
    bf16: float,
    f32: float,
    f64: float,
    memory: int,
    hbm_gb_s: int,
    host: tuple[int, int],
    percent: int = LARGE_PRODUCT_PERCENT,
    memory_percent: int = 100,
) -> Device:
    """A GPU from TFLOP/s in bf16, f32 and f64 (f32 on CUDA cores, torch's default), bytes of memory, GB/s of
    HBM, GB of host memory and GB/s to it, and the percent of the peak that large products reach, and of
    HBM's rate that other operations do."""
    rates = (
        ("bf16", round(bf16 * 1000)),
        ("f16", round(bf16 * 1000)),
        ("f32", round(f32 * 1000)),
        ("f64", round(f64 * 1000)),
    )
    # One eager PyTorch operator takes the host about 5 us; a CUDA context with NCCL's buffers about 1.5 GiB.
    return Device(
        kind,
        "cuda",
        rates,
        memory,
        hbm_gb_s * GB,
        percent,
        5_000,
        GIB * 3 // 2,
        "roofline",
        GPU_OVERHEADS,
        EXPERT_LOST_ROWS,
        host[0] * GB,
        host[1] * GB * HOST_COPY_PERCENT // 100,
        memory_percent=memory_percent,
    )


H100 = _gpu_device(
    "H100", 989, 67, 34, 80 * GIB, 3350, _DGX_GEN5, HOPPER_PRODUCT_PERCENT, HOPPER_MEMORY_PERCENT
)
H200 = _gpu_device(
    "H200", 989, 67, 34, 141 * GB, 4800, _DGX_GEN5, HOPPER_PRODUCT_PERCENT, HOPPER_MEMORY_PERCENT
)
A100 = _gpu_device("A100", 312, 19.5, 9.7, 80 * GIB, 2039, _DGX_GEN4)
A100_40GB = _gpu_device("A100_40GB", 312, 19.5, 9.7, 40 * GIB, 1555, (128, 32))
A800 = _gpu_device("A800", 312, 19.5, 9.7, 80 * GIB, 2039, _DGX_GEN4)
# Other sources give the B200 80 TFLOPS in f32 and 8 TB/s; the HGX board's figures are for eight GPUs as they
# are sold in nodes.
B200 = _gpu_device("B200", 2250, 75, 37, 180 * GB, 7700, _DGX_GEN5)
# Ada has one f64 unit per 64 f32 units; the others have one per two.
L40S = _gpu_device("L40S", 362, 91.6, 1.43, 48 * GB, 864, (64, 32))

# One process with one thread: no vendor's figure fits, so these are defaults of the order that a server core
# reaches.
CPU_PROCESS = Device(
    "cpu",
    "cpu",
    (("bf16", 10), ("f16", 5), ("f32", 20), ("f64", 10)),
    8 * GIB,
    8 * GB,
    50,
    5_000,
    0,
    "default",
    CPU_OVERHEADS,
    host_memory=8 * GIB,
    host_bytes_per_s=4 * GB,
)

DEVICE_PRESETS = {d.kind.lower(): d for d in (H100, H200, A100, A100_40GB, A800, B200, L40S, CPU_PROCESS)}

# (inside a node, between nodes), one direction for each device.
LINK_PRESETS = {
    "h100": (Link(3_000, 450 * GB), Link(8_000, 50 * GB)),
    "h200": (Link(3_000, 450 * GB), Link(8_000, 50 * GB)),
    "a100": (Link(4_000, 300 * GB), Link(8_000, 25 * GB)),
    "a100_40gb": (Link(4_000, 300 * GB), Link(8_000, 25 * GB)),
    "a800": (Link(4_000, 200 * GB), Link(8_000, 25 * GB)),
    "b200": (Link(3_000, 900 * GB), Link(8_000, 50 * GB)),
    "l40s": (Link(10_000, 32 * GB), Link(10_000, 25 * GB)),
    "cpu": (Link(300_000, 1 * GB), Link(300_000, 1 * GB)),
}

_NDR_SOURCE = (
    "one NDR InfiniBand port a GPU, 400 Gb/s (NVIDIA DGX H100 user guide: eight ConnectX-7); latency assumed"
)
_HDR_SOURCE = (
    "one HDR InfiniBand port a GPU, 200 Gb/s (NVIDIA DGX A100 user guide: eight ConnectX-6); latency assumed"
)
_ASSUMED_SOURCE = (
    "assumed: of the order that one core of a server reaches; `secc profile` measures this machine"
)

_GEN5_HOST_SOURCE = (
    "PCIe Gen5 x16, 64 GB/s in each direction (the kind's datasheet), 80% of it assumed for copies of"
    " page-locked memory; 2 TB of system memory for eight GPUs ({})"
)
_GEN4_HOST_SOURCE = (
    "PCIe Gen4 x16, 32 GB/s in each direction (the kind's datasheet), 80% of it assumed for copies of"
    " page-locked memory; {}"
)

_HOPPER_MOVED_SOURCE = "fitted on steps of secc on one H100 and one H200"
_A100_MOVED_SOURCE = "published steps on A100 need no less (docs/costs.md)"
_ASSUMED_MOVED_SOURCE = "assumed"

# Where each kind's figures come from: rates, memory (size and bandwidth), the part of its
# bandwidth that operations reach, the link inside a node, the link
# between nodes, the host's memory and the link to it.
FIGURE_SOURCES: dict[str, dict[str, str]] = {
    "h100": {
        "rates": (
            "NVIDIA H100 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS bf16 with sparsity "
            "(989 dense), 67 f32, 34 f64"
        ),
        "memory": "same datasheet: 80 GB HBM3 (80 GiB as the driver reports), 3.35 TB/s",
        "moved": _HOPPER_MOVED_SOURCE,
        "inside": "same datasheet: NVLink 900 GB/s in both directions; latency assumed",
        "between": _NDR_SOURCE,
        "host": _GEN5_HOST_SOURCE.format("NVIDIA DGX H100 user guide"),
    },
    "h200": {
        "rates": (
            "NVIDIA H200 Tensor Core GPU datasheet, SXM: 1,979 TFLOPS bf16 with sparsity "
            "(989 dense), 67 f32, 34 f64"
        ),
        "memory": "same datasheet: 141 GB HBM3e, 4.8 TB/s",
        "moved": _HOPPER_MOVED_SOURCE,
        "inside": "same datasheet: NVLink 900 GB/s in both directions; latency assumed",
        "between": _NDR_SOURCE,
        "host": _GEN5_HOST_SOURCE.format("NVIDIA DGX H200 user guide"),
    },
    "a100": {
        "rates": "NVIDIA A100 Tensor Core GPU datasheet, SXM 80 GB: 312 TFLOPS bf16, 19.5 f32, 9.7 f64",
        "memory": "same datasheet: 80 GB HBM2e, 2,039 GB/s",
        "moved": _A100_MOVED_SOURCE,
        "inside": "same datasheet: NVLink 600 GB/s in both directions; latency assumed",
        "between": _HDR_SOURCE,
        "host": _GEN4_HOST_SOURCE.format(
            "2 TB of system memory for eight GPUs (NVIDIA DGX A100 user guide, 640 GB system)"
        ),
    },
    "a100_40gb": {
        "rates": "NVIDIA A100 Tensor Core GPU datasheet, SXM 40 GB: 312 TFLOPS bf16, 19.5 f32, 9.7 f64",
        "memory": "same datasheet: 40 GB HBM2, 1,555 GB/s",
        "moved": _A100_MOVED_SOURCE,
        "inside": "same datasheet: NVLink 600 GB/s in both directions; latency assumed",
        "between": _HDR_SOURCE,
        "host": _GEN4_HOST_SOURCE.format(
            "1 TB of system memory for eight GPUs (NVIDIA DGX A100 user guide, 320 GB system)"
        ),
    },
    "a800": {
        "rates": (
            "as NVIDIA A100 80 GB (the A800 is its export variant): 312 TFLOPS bf16, 19.5 f32, 9.7 f64"
        ),
        "memory": "as NVIDIA A100 80 GB: 2,039 GB/s",
        "moved": _A100_MOVED_SOURCE,
        "inside": (
            "NVIDIA's statement on the A800 (Reuters, 11.2022): NVLink 400 GB/s in both "
            "directions, 600 on the A100; latency assumed"
        ),
        "between": _HDR_SOURCE,
        "host": _GEN4_HOST_SOURCE.format("2 TB of system memory for eight GPUs, as in a DGX A100"),
    },
    "b200": {
        "rates": (
            "NVIDIA HGX B200 datasheet, eight GPUs: 36 PFLOPS bf16 with sparsity (2.25 dense "
            "a GPU), 600 TFLOPS f32, 296 f64"
        ),
        "memory": "same datasheet: 1.44 TB HBM3e (180 GB a GPU), 62 TB/s (7.7 a GPU)",
        "moved": _ASSUMED_MOVED_SOURCE,
        "inside": "same datasheet: NVLink 5, 1.8 TB/s a GPU in both directions; latency assumed",
        "between": (
            "one 400 Gb/s port a GPU (NVIDIA DGX BasePOD reference architecture: eight "
            "ConnectX-7); latency assumed"
        ),
        "host": _GEN5_HOST_SOURCE.format("NVIDIA DGX B200 datasheet, which allows 4 TB"),
    },
    "l40s": {
        "rates": (
            "NVIDIA L40S datasheet: 362.05 TFLOPS bf16 dense (733 with sparsity), 91.6 f32; "
            "f64 at 1/64 of f32"
        ),
        "memory": "same datasheet: 48 GB GDDR6, 864 GB/s",
        "moved": _ASSUMED_MOVED_SOURCE,
        "inside": "same datasheet: PCIe Gen4 x16, 64 GB/s in both directions; latency assumed",
        "between": "200 Gb/s Ethernet or InfiniBand, assumed",
        "host": _GEN4_HOST_SOURCE.format("512 GB of system memory for eight GPUs, assumed"),
    },
    "cpu": {
        "rates": _ASSUMED_SOURCE,
        "memory": _ASSUMED_SOURCE,
        "moved": _ASSUMED_SOURCE,
        "inside": "assumed: gloo over TCP",
        "between": "assumed: gloo over TCP",
        "host": "assumed: device and host share a memory; of the order that one core copies",
    },
}
