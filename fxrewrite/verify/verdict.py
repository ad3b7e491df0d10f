"""What a verification found: on how many samples, over which alternatives of the pattern, and where it went wrong."""

from __future__ import annotations

from dataclasses import dataclass

from fxrewrite.errors import VerificationError
from fxrewrite.verify.compare import Difference

__all__ = ["Counterexample", "Verdict"]


@dataclass(frozen=True, slots=True)
class Counterexample:
    """The smallest sample that was found on which original and rewritten graph differ.

    Attributes:
        difference: how.
        snippet: Python that shows it: run, it prints both results, and leaves them in `expected` and `found`.
        num_steps: how many samples were tried to make it small.
    """

    difference: Difference
    snippet: str
    num_steps: int

    def __str__(self) -> str:
        return f"{self.difference}\n\n{self.snippet}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What testing a rule found; a rule that passed was tested, not proved.

    Attributes:
        rule: id of the rule.
        samples: graphs that were rewritten and compared.
        refused: graphs that match and that the rule left alone.
        raised: of the samples, those on which the original raises; the rewritten graph must raise too.
        gradients: of the samples, those whose gradients were compared.
        drawn: of the samples, those whose values were not compared, since the rule may draw other numbers.
        variants: alternatives of the pattern, each as "term: option", that were in a graph that matched.
        uncovered: alternatives that were in none.
        remarks: what a reader should know and is no error.
        counterexample: where it is false; None where no difference was found.
        error: why nothing can be said, or too little; empty otherwise.
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

    @property
    def ok(self) -> bool:
        """Whether it was tested enough and no difference was found."""
        return self.counterexample is None and not self.error

    def raise_if_false(self) -> None:
        """Do nothing if it is ok.

        Raises:
            VerificationError: it is not; the message is the whole verdict.
        """
        if not self.ok:
            raise VerificationError(str(self))

    def __str__(self) -> str:
        lines = [f"{self.rule}: {self._summary()}"]
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
        if self.counterexample is not None:
            lines += ["", str(self.counterexample)]
        return "\n".join(lines)

    def _summary(self) -> str:
        if self.counterexample is not None:
            return f"false: {self.counterexample.difference} (sample {self.samples})"
        tested = f"tested on {self.samples} samples, no difference"
        return f"{self.error} ({tested})" if self.error and self.samples else self.error or tested
