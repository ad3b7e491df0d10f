"""Heads with their losses and MLPs, computed a tile of rows at a time."""
