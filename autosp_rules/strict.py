"""What `strict=True` refuses beyond operators without a layout rule: a model that runs mostly whole."""

from __future__ import annotations

from typing import Any

from autosp_rules.errors import AutoSPError
from autosp_rules.sequence import tokens_per_rank
from fxrewrite import Edit, Report
from fxrewrite.spmd import PLACEMENTS, ProductsWhole

MOST_WHOLE = 0.1
"""Largest share of the operations of matrix products that every rank may compute whole under `strict=True`: a head for
one token of a long sequence is below it, a layer that is gathered is not."""


class RefuseWhole:
    """The step that checks that matrix products of a sequence of two tokens or more run sharded.

    Raises:
        AutoSPError: every rank computes more than `MOST_WHOLE` of them whole.
    """

    name = "refuse_whole"
    needs = (PLACEMENTS,)

    def run(self, edit: Edit, context: Any, report: Report) -> int:
        for event in report.events_of(ProductsWhole):
            if tokens_per_rank(edit.gm) > 1 and event.share > MOST_WHOLE:
                raise AutoSPError.of(
                    f"strict=True: {event}",
                    hint=f"more than {MOST_WHOLE:.0%} is not sequence parallelism; without strict=True it runs so",
                )
        return 0

    def text(self) -> str:
        return f"no more than {MOST_WHOLE:.0%} of the operations of matrix products run whole on every rank"
