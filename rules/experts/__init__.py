"""Mixtures of experts: what stands between a sort of tokens and its inverse is one operator."""
