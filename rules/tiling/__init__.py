"""Chunked computation: MLPs, and heads with their losses, are computed a tile of rows at a time."""
