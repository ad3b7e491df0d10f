"""What operators compute: a table of meanings for each family of operators."""
