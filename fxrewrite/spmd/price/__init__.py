"""What a way to run something costs one rank, and the choice of the cheapest."""
