"""What a layer keeps for backward and what it computes again: costs, tags, tiles, offload, logits."""
