"""Check of the CUDA path without a GPU: ranks run on fake tensors of a stub CUDA device, which executes nothing."""
