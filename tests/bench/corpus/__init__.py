"""A hundred true rules and a hundred false ones, as authors of kernels and compilers write them.

Most are pairs: a true rule, and a twin that is false by one detail. `python -m tests.bench.corpus` says what `verify`
finds of each; docs/proofs.md has the result. The rules were written without a look at what `verify` draws; a few were
corrected afterwards, which docs/proofs.md names.
"""

from __future__ import annotations

from tests.bench.corpus.activations import ACTIVATIONS
from tests.bench.corpus.attention import ATTENTION
from tests.bench.corpus.cases import Case, Family
from tests.bench.corpus.convolutions import CONVOLUTIONS
from tests.bench.corpus.elementwise import ELEMENTWISE
from tests.bench.corpus.indexing import INDEXING
from tests.bench.corpus.integers import INTEGERS
from tests.bench.corpus.linears import LINEARS
from tests.bench.corpus.losses import LOSSES
from tests.bench.corpus.norms import NORMS
from tests.bench.corpus.other import OTHER
from tests.bench.corpus.reductions import REDUCTIONS
from tests.bench.corpus.views import VIEWS

FAMILIES: tuple[Family, ...] = (
    *(ELEMENTWISE, ACTIVATIONS, NORMS, LOSSES, ATTENTION, LINEARS),
    *(VIEWS, INDEXING, CONVOLUTIONS, REDUCTIONS, INTEGERS, OTHER),
)
CASES: tuple[Case, ...] = tuple(case for family in FAMILIES for case in family.cases)
