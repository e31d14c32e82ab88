"""The oracle: every op in plain PyTorch, one module a stage. It is the CPU path and imports no Triton."""
