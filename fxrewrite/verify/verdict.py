"""The result of a verification: number of samples, alternatives that occurred, and the counterexample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fxrewrite.errors import VerificationError
from fxrewrite.verify.compare import Difference


@dataclass(frozen=True, slots=True)
class Counterexample:
    """The smallest sample found on which the original and the rewritten graph differ.

    Attributes:
        difference: how they differ.
        snippet: a Python program that prints both results, and leaves them in `expected` and `found`.
        num_steps: how many samples were tried to make it small.
    """

    difference: Difference
    snippet: str
    num_steps: int

    def __str__(self) -> str:
        return f"{self.difference}\n\n{self.snippet}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of testing a rule; a rule that passed was tested; `proof` says whether it is proved.

    Attributes:
        rule: id of the rule.
        samples: number of graphs that were rewritten and compared.
        refused: number of graphs that match and that the rule left alone.
        raised: number of samples on which the original raises; the rewritten graph must raise too.
        gradients: number of samples whose gradients were compared.
        drawn: number of samples whose values were not compared, because the rule may draw other numbers.
        variants: alternatives of the pattern, each as "term: option", that occurred in a matching graph.
        uncovered: alternatives that never occurred.
        remarks: what a reader should know but is not an error.
        counterexample: where the rule is false; None if no difference was found.
        error: why the test says nothing, or too little; else empty.
        ungraded: why no sample's gradients were compared, although the original is differentiable; else empty.
        proof: what is proved of the rule, or why it is not, if that was asked for.
        seed: of the samples.
        lacks: of a false rule, gives the constraints with which it is true, as text to paste; takes a few seconds.
    """

    rule: str
    samples: int = 0
    refused: int = 0
    raised: int = 0
    gradients: int = 0
    drawn: int = 0
    variants: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    counterexample: Counterexample | None = None
    error: str = ""
    ungraded: str = ""
    proof: str = ""
    seed: int = 0
    lacks: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the rule was tested enough, and no difference was found."""
        return self.counterexample is None and not self.error

    def raise_if_false(self) -> None:
        """Raises if the rule is not ok.

        Raises:
            VerificationError: the rule is not ok; the message is the whole verdict.
        """
        if not self.ok:
            raise VerificationError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self._summary()}"]
        if self.counterexample is not None:
            lines += ["", self.counterexample.snippet]
            lines += [f"To reproduce: run this program, or verify(samples={self.samples}, seed={self.seed})."]
            lines += [self.lacks()] if self.lacks is not None else []
        counts = [
            f"{self.refused} matches refused" if self.refused else "",
            f"{self.raised} samples raise before and after" if self.raised else "",
            f"gradients compared on {self.gradients}",
            f"{self.drawn} compared in shape and dtype alone: the rule may draw other numbers" if self.drawn else "",
        ]
        if self.samples:
            lines.append("  " + ", ".join(filter(None, counts)))
        alternatives = len(self.variants) + len(self.uncovered)
        if alternatives:
            lines.append(f"  {len(self.variants)} of {alternatives} alternatives of the pattern were met")
        lines += [f"  never met: {variant}" for variant in self.uncovered]
        lines += [f"  {remark}" for remark in self.remarks]
        return "\n".join(lines)

    def _summary(self) -> str:
        if self.counterexample is not None:
            return f"false: {self.counterexample.difference} (sample {self.samples})"
        tested = f"tested on {self.samples} samples, no difference"
        tested += f", but gradients were not compared: {self.ungraded}" if self.ungraded else ""
        said = f"{self.error} ({tested})" if self.error and self.samples else self.error or tested
        return f"{said}; {self.proof}" if self.proof else said
