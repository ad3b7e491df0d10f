"""What a layer saves for backward and what it recomputes: costs, tags, tiles, offload, logits."""
