"""What connects AutoSP with outside training systems: one module for each, which imports its system lazily."""
