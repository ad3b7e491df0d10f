"""Mixtures of experts: the operators between a sort of token-expert pairs and its inverse become one node."""
