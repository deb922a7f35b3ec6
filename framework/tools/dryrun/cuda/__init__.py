"""Check of the CUDA path on a machine without a GPU: ranks run on fake tensors of a CUDA device that does nothing."""
