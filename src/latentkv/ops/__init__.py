"""The public ops, one module a stage: argument checks, `torch.library` registration, docstrings."""
