"""What plans put into graphs besides ATen: operators of gradients, rows sent to ranks, nodes that a graph has once."""
