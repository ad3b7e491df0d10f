"""Is a declared rule true? Run and compare."""

from fxrewrite.verify.layouts import LayoutTrial, try_layouts

__all__ = ["LayoutTrial", "try_layouts"]
