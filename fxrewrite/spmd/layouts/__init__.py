"""What the dimensions of an operator are: index notation, and layout rules as values with an id."""
