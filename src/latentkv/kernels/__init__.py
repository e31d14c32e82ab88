"""Triton kernels, one module a stage: launch functions with the signatures of the references they replace."""
