"""Triton kernels, usable alone: tensors in, tensors out, nothing of the engine is imported."""
