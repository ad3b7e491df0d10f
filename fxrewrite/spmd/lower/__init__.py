"""From global values with placements to what each rank computes: local shapes, slices and collectives."""
