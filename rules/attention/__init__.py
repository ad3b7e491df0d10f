"""Attention: how models write it, the one operator that it becomes, and the kernels that it is lowered to."""
