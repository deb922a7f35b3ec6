"""Linears in float8: rowwise quantisation, products, the linear with its backward,
and conversion of a model.
"""
