"""Attention masks: reading a dense mask as an expression, bounding it, naming its meaning, and tiling it."""
