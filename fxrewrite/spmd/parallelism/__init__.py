"""A parallelism as data, on a model: stated, compiled, with its parameters at rest in shards."""
