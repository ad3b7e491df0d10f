"""From placements that are stated to the placement of every value: decided, explained, and checked to be legal."""
