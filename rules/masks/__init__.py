"""Masks of attention: what a dense mask means, read as an expression, bounded, named, and tiled."""
