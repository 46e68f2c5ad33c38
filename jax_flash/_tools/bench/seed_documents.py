"""What the documents published whose results ``bench seeds`` reproduces: their figures as they have them, and no other.

Figures of this package are never here: they are measured.
"""

import dataclasses

# flash-attention-v100.md: kernels for Volta, on a V100 against PyTorch

V100 = "flash-attention-v100.md"


@dataclasses.dataclass(frozen=True)
class Volta:
    """A row of its table. Its memory savings and speed-ups are against PyTorch's plain attention."""

    group: str
    batch: int
    heads: int
    q_length: int
    kv_length: int
    head_dim: int
    causal: bool
    memory: str
    """As it is printed: "~0%" or "82%"."""
    forward: float
    backward: float
    total: float


VOLTA = tuple(
    Volta(group, *row)
    for group, rows in {
        "Small scale": (
            (1, 1, 16, 16, 16, False, "~0%", 5.55, 26.65, 19.36),
            (1, 1, 16, 16, 16, True, "~0%", 7.25, 27.93, 21.09),
            (1, 1, 32, 32, 32, False, "~0%", 6.41, 24.25, 18.35),
            (1, 1, 32, 32, 32, True, "~0%", 7.14, 29.22, 21.63),
            (1, 1, 64, 64, 64, False, "~1%", 6.61, 25.95, 19.34),
            (1, 1, 64, 64, 64, True, "~1%", 7.23, 29.83, 21.81),
            (1, 1, 128, 128, 128, False, "~3%", 6.30, 26.63, 19.96),
            (1, 1, 128, 128, 128, True, "~4%", 7.48, 28.98, 21.81),
            (1, 1, 256, 256, 256, False, "~10%", 6.46, 21.33, 16.87),
            (1, 1, 256, 256, 256, True, "~12%", 7.48, 23.96, 19.13),
        ),
        "Medium scale": (
            (1, 16, 1024, 1024, 64, False, "82%", 2.18, 4.77, 4.10),
            (1, 16, 1024, 1024, 64, True, "82%", 2.70, 5.53, 4.78),
            (1, 32, 1024, 1024, 64, False, "84%", 2.16, 2.88, 2.70),
            (1, 32, 1024, 1024, 64, True, "84%", 2.78, 3.13, 3.04),
            (1, 16, 1024, 1024, 128, False, "73%", 1.91, 2.75, 2.56),
            (1, 16, 1024, 1024, 128, True, "73%", 2.29, 3.12, 2.93),
        ),
        "Large scale": (
            (1, 32, 2048, 2048, 128, False, "85%", 1.79, 1.42, 1.50),
            (1, 32, 2048, 2048, 128, True, "85%", 2.24, 1.66, 1.78),
            (1, 32, 4096, 4096, 128, False, "92%", 1.80, 1.33, 1.42),
            (1, 32, 4096, 4096, 128, True, "92%", 2.27, 1.57, 1.71),
        ),
        "Very large D": (
            (1, 16, 1024, 1024, 256, False, "61%", 1.44, 1.20, 1.25),
            (1, 16, 1024, 1024, 256, True, "61%", 1.63, 1.36, 1.41),
            (1, 32, 2048, 2048, 256, False, "75%", 1.38, 1.03, 1.05),
            (1, 32, 2048, 2048, 256, True, "75%", 1.57, 1.05, 1.15),
            (1, 32, 4096, 4096, 256, False, "86%", 1.34, 1.06, 1.02),
            (1, 32, 4096, 4096, 256, True, "86%", 1.55, 1.04, 1.14),
        ),
    }.items()
    for row in rows
)

VOLTA_TOLERANCE = 1e-3
"""The document's "Forward & Backward correct at atol=1e-3"."""

# from-scratch-ampere.md: 16 kernels of one forward pass, each against FlashAttention-2

FROM_SCRATCH = "from-scratch-ampere.md"
FROM_SCRATCH_HEAD_DIM = 128
FROM_SCRATCH_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FROM_SCRATCH_GPUS = ("A100", "RTX 3090")
FROM_SCRATCH_REFERENCE = {"A100": (94.28, 88.01), "RTX 3090": (34.04, 33.48)}
"""TFLOP/s of FlashAttention-2: at length 4096, and the harmonic mean over the lengths."""

FROM_SCRATCH_KERNELS: tuple[tuple[str, tuple[float, float, float, float]], ...] = (
    ("1. Base Implementation", (15.8, 16.6, 49.5, 49.8)),
    ("2. Swizzling", (72.6, 72.4, 98.3, 98.6)),
    ("3. Eagerly Loading K & V Blocks", (77.6, 79.9, 99.4, 100.0)),
    ("4. Interleaving On-Chip LD/ST with Computation", (77.6, 80.0, 100.0, 100.4)),
    ("5. Double Buffering Shared Memory to Register File Loads", (76.8, 79.1, 99.7, 100.3)),
    ("6. Improving FP32 Throughput", (78.1, 80.4, 99.9, 100.4)),
    ("7. Auto-Tuning", (80.3, 82.3, 101.5, 101.8)),
    ("8. Reducing IADD3, LOP3, and SHF instructions", (87.8, 88.9, 101.7, 101.2)),
    ("9. Reducing IMAD.MOV.U32 and MOV instructions", (95.3, 96.3, 97.5, 97.4)),
    ("10. Removing CSRZ Instructions + Optimizing Initial Softmax Iteration", (93.9, 95.0, 102.9, 102.3)),
    ("11. Encoded Swizzling from the RF to SMEM", (95.2, 96.7, 102.8, 102.3)),
    ("12. Miscellaneous Code Changes", (95.3, 97.0, 102.8, 102.3)),
    ("13. Iterating Backwards", (97.6, 98.8, 101.5, 101.2)),
    ("14. Cache Configuration", (97.7, 99.1, 101.5, 101.2)),
    ("15. Tiling along d_head", (97.9, 99.5, 101.5, 101.3)),
    ("16. Static GMEM Stride", (99.2, 100.4, 100.9, 100.7)),
)
"""Per cent of FlashAttention-2: A100 at length 4096 and in the harmonic mean, RTX 3090 likewise."""

# triton-v1-v2.md: kernels in Triton, on a T4

T4 = "triton-v1-v2.md"
T4_HEAD_DIM = 64
T4_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
INFINITE = float("inf")
"""What the document prints where a length did not fit."""

T4_IMPLEMENTATIONS = {
    "flash2": "Triton V2 (Non-Atomic)",
    "flash2_atomic": "Triton V2 (Atomic)",
    "flash1": "Triton V1",
    "torch-flash": "PyTorch (Flash)",
    "torch-plain": "PyTorch (Naive)",
}
"""The names here of what the document has."""

T4_MILLISECONDS: dict[str, dict[str, tuple[float, ...]]] = {
    "forward": {
        "flash2": (0.064, 0.090, 0.340, 1.455, 5.876, 23.572, 95.750),
        "flash2_atomic": (0.056, 0.092, 0.330, 1.455, 5.739, 23.859, 96.884),
        "flash1": (0.037, 0.094, 0.331, 1.511, 6.338, 26.895, 108.312),
        "torch-flash": (0.071, 0.180, 0.668, 2.792, 11.358, 45.864, 186.714),
        "torch-plain": (0.147, 0.525, 2.005, 11.771, 39.585, INFINITE, INFINITE),
    },
    "forward + backward": {
        "flash2": (0.414, 0.653, 2.354, 9.026, 34.458, 140.075, 572.292),
        "flash2_atomic": (0.498, 0.975, 3.497, 12.731, 48.998, 201.640, 835.843),
        "flash1": (0.316, 0.703, 2.413, 9.786, 39.087, 157.118, 646.165),
        "torch-flash": (0.319, 1.036, 3.547, 13.074, 51.434, 213.637, 930.631),
        "torch-plain": (0.474, 1.634, 6.241, 27.586, 112.488, INFINITE, INFINITE),
    },
}
"""By pass and implementation, in the order of `T4_LENGTHS`."""

T4_ERRORS: dict[str, tuple[float, float, float, float]] = {
    "flash1": (9.77e-04, 1.46e-03, 1.95e-03, 9.77e-04),
    "flash2_atomic": (9.77e-04, 1.46e-03, 1.95e-03, 9.77e-04),
    "flash2": (9.77e-04, 9.77e-04, 1.95e-03, 9.77e-04),
    "torch-flash": (9.77e-04, 9.77e-04, 1.95e-03, 1.95e-03),
}
"""Largest errors of out, dq, dk and dv."""

# naive-v1-v2.md: version 1 and 2 in float32 and float16. It states no shape.

NAIVE = "naive-v1-v2.md"


@dataclasses.dataclass(frozen=True)
class Naive:
    """Errors as printed, and microseconds of "total_cuda_time"."""

    out: float
    dquery: float
    dkey: float
    dvalue: float
    forward: int
    backward: int
    plain_forward: int
    """Of its "manual attention"; it includes what PyTorch does once."""
    plain_backward: int


NAIVE_FIGURES: dict[str, dict[str, Naive]] = {
    "float32": {
        "flash1": Naive(4.172325e-07, 4.7683716e-07, 8.34465e-07, 4.7683716e-07, 129, 495, 935441, 2028),
        "flash2": Naive(4.7683716e-07, 6.556511e-07, 1.9073486e-06, 5.9604645e-07, 137, 557, 979501, 2218),
    },
    "float16": {
        "flash1": Naive(0.009766, 0.009766, 0.009766, 0.006836, 138, 529, 961884, 2068),
        "flash2": Naive(0.01123, 0.010254, 0.01367, 0.006836, 153, 633, 931775, 2202),
    },
}
"""By dtype and version."""
