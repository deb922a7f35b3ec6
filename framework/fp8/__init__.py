"""Linears in float8: quantisation by rows, the products, the linear with its gradients, and the linears that use it."""
