"""Programming interfaces of other engines, one file each: what is written for them runs as rules of a plan."""
