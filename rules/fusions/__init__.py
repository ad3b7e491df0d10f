"""Patterns of layers that become one operator: norms, activations, rotary embeddings, SwiGLU, linears."""
