"""Predicts the speed of CUDA kernels from their machine code; not imported by the package, and in no wheel."""
