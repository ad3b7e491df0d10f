"""Loads inductor once, and with it the deprecated parts of torch that torch itself still imports."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit.script_method.* is deprecated", DeprecationWarning)
    import torch._inductor.compile_fx  # noqa: F401
