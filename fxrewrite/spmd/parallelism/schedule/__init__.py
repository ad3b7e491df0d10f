"""When collectives of parameters alone run, after all axes are lowered: the last steps of a plan.

local_gradients     gradients that leave unreduced, under `accumulate`
send_less           casts go in front of gathers, means behind the scatters of gradients
average_together    one mean of a layer's gradients
gather_late         a layer's shards are gathered by one collective, one layer ahead
"""

from fxrewrite.plan import RuleSet
from fxrewrite.spmd.parallelism.schedule.average_together import AverageTogether
from fxrewrite.spmd.parallelism.schedule.gather_late import GatherLate
from fxrewrite.spmd.parallelism.schedule.local_gradients import LocalGradients
from fxrewrite.spmd.parallelism.schedule.send_less import SendLess

__all__ = ["SCHEDULE"]

SCHEDULE = RuleSet("schedule", LocalGradients(), SendLess(), AverageTogether(), GatherLate())
