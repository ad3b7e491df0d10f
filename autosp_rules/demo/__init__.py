"""The training job of `autosp demo` and `autosp train`: its configuration, its steps, its processes."""
