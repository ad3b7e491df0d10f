"""One spelling of each thing: no-ops away, a mean is a sum by a count."""
