"""A package, so that no `tests` that another project installs is found first."""
