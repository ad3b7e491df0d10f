"""Patterns of layers that become one operator: norms, activations, rotary, swiglu, linears, biases."""
