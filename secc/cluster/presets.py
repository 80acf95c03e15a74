"""Figures of known devices: peak rates of dense matrix products, memory, links, each with its source.

Peaks are the vendor's; what training reaches of them (`efficiency_percent`) is an assumption, a large GEMM in bf16 reaching about 0.7 to
0.8 of peak and whole training steps about half. Latencies and the CPU's figures are assumptions, too.
"""

from __future__ import annotations

from secc.cluster.types import GIB, Device, Link

GB = 10**9


def _gpu(kind: str, bf16: int, f32: int, memory: int, hbm_gb_s: int) -> Device:
    """A GPU from TFLOP/s in bf16 and f32 (CUDA cores, as torch multiplies float32 by default), bytes of memory and GB/s of HBM."""
    rates = (("bf16", bf16 * 1000), ("f16", bf16 * 1000), ("f32", f32 * 1000), ("f64", f32 * 500))
    # One eager PyTorch operator takes the host about 5 us; a CUDA context with NCCL's buffers about 1.5 GiB.
    return Device(kind, "cuda", rates, memory, hbm_gb_s * GB, 50, 5_000, GIB * 3 // 2, "roofline")


H100 = _gpu("H100", 989, 67, 80 * GIB, 3350)  # NVIDIA H100 datasheet, SXM: 1,979 TFLOPS bf16 with sparsity, 67 f32, 80 GB, 3.35 TB/s
H200 = _gpu("H200", 989, 67, 141 * GB, 4800)  # NVIDIA H200 datasheet, SXM: rates of H100, 141 GB, 4.8 TB/s
A100 = _gpu("A100", 312, 19, 80 * GIB, 2039)  # NVIDIA A100 datasheet, SXM 80 GB: 312 TFLOPS bf16, 19.5 f32, 2,039 GB/s
A800 = _gpu("A800", 312, 19, 80 * GIB, 2039)  # as A100; NVLink cut to 400 GB/s
B200 = _gpu("B200", 2250, 75, 180 * GB, 7700)  # NVIDIA HGX B200 datasheet / 8: 36 PFLOPS bf16 sparse, 600 TFLOPS f32, 1.44 TB, 62 TB/s
L40S = _gpu("L40S", 362, 91, 48 * GB, 864)  # NVIDIA L40S datasheet: 362.05 TFLOPS bf16 dense, 91.6 f32, 48 GB, 864 GB/s

# One process with one thread: no vendor's figure fits, so these are defaults of the order that a server core reaches.
CPU = Device("cpu", "cpu", (("bf16", 10), ("f16", 5), ("f32", 20), ("f64", 10)), 8 * GIB, 8 * GB, 50, 5_000, 0, "default")

DEVICES = {d.kind.lower(): d for d in (H100, H200, A100, A800, B200, L40S, CPU)}

# (inside a node, between nodes), one direction for each device.
LINKS = {
    "h100": (Link(3_000, 450 * GB), Link(8_000, 50 * GB)),  # NVLink 4: 900 GB/s both directions; one NDR InfiniBand port (400 Gb/s) a GPU
    "h200": (Link(3_000, 450 * GB), Link(8_000, 50 * GB)),  # as H100
    "a100": (Link(4_000, 300 * GB), Link(8_000, 25 * GB)),  # NVLink 3: 600 GB/s both directions; HDR InfiniBand (200 Gb/s)
    "a800": (Link(4_000, 200 * GB), Link(8_000, 25 * GB)),  # NVLink 3 with 8 of 12 links: 400 GB/s both directions
    "b200": (Link(3_000, 900 * GB), Link(8_000, 50 * GB)),  # NVLink 5: 1.8 TB/s both directions; NDR InfiniBand
    "l40s": (Link(10_000, 32 * GB), Link(10_000, 25 * GB)),  # PCIe 4.0 x16: 64 GB/s both directions; 200 Gb/s Ethernet or InfiniBand
    "cpu": (Link(300_000, 1 * GB), Link(300_000, 1 * GB)),  # gloo over TCP: default
}
