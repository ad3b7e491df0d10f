"""The properties of a graph on its way to a local program, in the order in which a plan over an axis gives them."""

from fxrewrite.plan.contracts import Property

PLACEMENTS = Property("placements", given_by="a PropagatePlacements step")
"""How ranks hold every value is known, and what disagrees is redistributed; values are global ones."""
LOCAL_SHAPES = Property("local shapes", given_by="a LocalizeShapes step")
"""Values are those of one rank."""
COLLECTIVE_CALLS = Property("collective calls", given_by="COLLECTIVE_RULES")
"""No redistribution is left."""
