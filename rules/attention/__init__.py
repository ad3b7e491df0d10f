"""Attention: the spellings that models use, the one operator that they become, and the kernels that implement it."""
