"""Layout rules found and tested by experiment: an operator runs whole and on slices of its operands."""
