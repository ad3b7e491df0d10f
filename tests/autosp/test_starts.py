"""Where sharding starts: what counts as the sequence, what does not, and that either way the numbers are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name that everybody gives it
from torch import Tensor, nn

from autosp_rules import AutoSPConfig, AutoSPError, dry_run
from tests.autosp.attention_layer import attention_line
from tests.autosp.one_device import assert_equal_to_one_device
from tests.zoo.others import others

BATCH, LENGTH, WIDTH, VOCAB = 2, 16, 16, 11
IDS = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
FEATURES = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
PIXELS = torch.randn(BATCH, 3, 6, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Model(nn.Module):
    """`start(self, x)` makes hidden states [B, S, 16]; one attention and a loss follow."""

    def __init__(self, start: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start = start
        self.table, self.tokens = nn.Parameter(torch.randn(VOCAB, WIDTH)), nn.Embedding(VOCAB, WIDTH)
        self.bias = nn.Embedding(VOCAB, 1)
        self.patches, self.token = nn.Conv2d(3, WIDTH, 2, 2), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.double()

    def forward(self, **inputs: Tensor) -> Tensor:
        x = self.start(self, **inputs)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return (x + y).pow(3).mean()


def shifted(ids: Tensor) -> Tensor:
    """As encoder-decoders make their decoder's ids of labels: by writing to a new tensor."""
    new = ids.new_zeros(ids.shape)
    new[:, 1:] = ids[:, :-1].clone()
    new[:, 0] = 3
    return new


def patches(m: Model, x: Tensor) -> Tensor:
    found = m.patches(x).flatten(2).transpose(1, 2)
    return torch.cat([m.token.expand(BATCH, 1, WIDTH), found], 1)


STARTS: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "ids": (lambda m, x: m.tokens(x), {"x": IDS}),
    "ids [S, B], transposed": (lambda m, x: m.tokens(x.transpose(0, 1).contiguous()).transpose(0, 1), {"x": IDS}),
    "ids written to a new tensor": (lambda m, x: m.tokens(shifted(x)), {"x": IDS}),
    "hashed ids": (lambda m, x: m.tokens((x * 7 + x.roll(1, 1)) % VOCAB), {"x": IDS}),
    "positions counted from a mask": (lambda m, x: m.tokens((x > 4).long().cumsum(1) % VOCAB), {"x": IDS}),
    "indexing": (lambda m, x: m.table[x], {"x": IDS}),
    "one-hot product": (lambda m, x: F.one_hot(x, VOCAB).double() @ m.table, {"x": IDS}),
    "features": (lambda m, x: x, {"x": FEATURES}),
    "features and positions": (lambda m, x: x * 2 + m.table[:1], {"x": FEATURES}),
    "features [S, B]": (lambda m, x: x.transpose(0, 1), {"x": FEATURES.transpose(0, 1).contiguous()}),
    "flattened features": (
        lambda m, x: x + torch.addmm(m.tokens.weight[0], x.view(-1, WIDTH), m.qkv.weight[:WIDTH]).view(x.shape),
        {"x": FEATURES},
    ),
    "patches and a class token": (patches, {"x": PIXELS}),
}


@pytest.mark.parametrize("name", STARTS)
def test_hidden_states_start_sharded(name: str) -> None:
    start, inputs = STARTS[name]
    inputs = {name: x.clone().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    report = assert_equal_to_one_device(Model(start), inputs)
    assert report.tokens_per_rank == BATCH * LENGTH // 4
    assert not [line for line in report.lines if line.startswith("whole:")]


@pytest.mark.parametrize("name", [name for name in others() if name.startswith(("torch.nn", "nanoGPT"))])
@pytest.mark.some(2)
def test_models_from_outside_transformers(name: str) -> None:
    model = others()[name]
    report = assert_equal_to_one_device(
        model.build("sdpa", torch.float64), model.inputs(torch.float64), config=model.config
    )
    assert report.tokens_per_rank == 8
    assert not [line for line in report.lines if line.startswith(("whole:", "gathered:"))]


def test_what_comes_before_is_computed_sharded_too() -> None:
    """One-hot vectors are as wide as the vocabulary: the ids are cut, not the vectors."""
    _, report = dry_run(Model(STARTS["one-hot product"][0]), {"x": IDS}, num_ranks=2)
    assert "collectives.slice" not in report.rewrites
    assert report.rewrites["autosp.shard_position_ids"] == 1


def test_another_dimension_is_the_sequence_where_that_is_said() -> None:
    ids = IDS.T.contiguous()
    model = Model(lambda m, x: m.tokens(x).transpose(0, 1))
    report = assert_equal_to_one_device(model, {"x": ids}, ranks=(4,))
    [line] = [line for line in report.lines if line.startswith("padded:")]
    assert "in 4 chunks of 1, of which the last 2 entries are padding" in line
    assert line.endswith("if another dimension is the sequence, pass its number: autosp(sequence_dim=...)")
    report = assert_equal_to_one_device(model, {"x": ids}, config=AutoSPConfig(sequence_dim=0), ranks=(4,))
    assert not [line for line in report.lines if line.startswith("padded:")]
    with pytest.raises(AutoSPError, match=r"sequence_dim=2: no input has its sequence there: .*x \[16, 2\]; pass"):
        dry_run(model, {"x": ids}, num_ranks=2, config=AutoSPConfig(sequence_dim=2))


@pytest.mark.parametrize("length", [15, 16])
def test_ids_may_have_no_dimension_but_the_sequence(length: int) -> None:
    """As where documents are packed in one row; where nobody says it, they are one for each row of a batch."""

    class Flat(Model):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.tokens(x)
            q, k, v = self.qkv(self.norm(rows)).unflatten(-1, (3, 4, 4)).permute(1, 2, 0, 3).unsqueeze(1)
            return (rows + F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1)).pow(3).mean()

    model, row = Flat(lambda m, x: x), IDS[0, :length]
    report = assert_equal_to_one_device(model, {"x": row}, config=AutoSPConfig(sequence_dim=0))
    assert report.tokens_per_rank == 4
    with pytest.raises(AutoSPError, match=r"as their only dimension, say so: autosp\(sequence_dim=0\)"):
        dry_run(model, {"x": row}, num_ranks=2)
    report = assert_equal_to_one_device(Model(lambda m, x: m.tokens(x[0])[None]), {"x": row[None]})
    assert report.tokens_per_rank == 4


@pytest.mark.parametrize(("marked", "length"), [((0,), 15), ((1,), 16), ((0, 1), 15)])
@pytest.mark.some(1)
def test_a_symbolic_batch_is_not_the_sequence(marked: tuple[int, ...], length: int) -> None:
    """Nor is anything else changed by which dimensions are symbolic: a batch of 4 on 4 ranks would be divided, too."""
    ids: Any = torch.randint(0, VOCAB, (4, length), generator=torch.Generator().manual_seed(0))
    features = torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for dim in marked:
        torch._dynamo.mark_dynamic(ids, dim)
        torch._dynamo.mark_dynamic(features, dim)
    config = AutoSPConfig(attention="ulysses")
    model = Model(lambda m, x, features: m.tokens(x) + m.norm(features))
    report = assert_equal_to_one_device(model, {"x": ids, "features": features}, config=config, ranks=(4,))
    assert report.tokens_per_rank == 4 * 4
    assert "1 x ulysses: asked for: 4 heads divide over axis sp" in attention_line(report)


NOT_THE_SEQUENCE: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor]]] = {
    "one id for a whole sequence": (lambda m, x, tag: m.tokens(x) + m.tokens(tag), {"x": IDS, "tag": IDS[:, :1]}),
    "an id for each pair of tokens": (
        lambda m, x, pairs: m.tokens(x) * m.bias(pairs).mean(1),
        {"x": IDS, "pairs": IDS[:, :, None].expand(BATCH, LENGTH, LENGTH).contiguous()},
    ),
    "an image by its height": (lambda m, x, image: m.tokens(x) + m.patches(image).mean(), {"x": IDS, "image": PIXELS}),
    "positions of the model": (lambda m, x: m.tokens(x) + m.tokens(torch.arange(LENGTH) % VOCAB), {"x": IDS}),
}


def test_a_length_that_the_data_says_is_not_the_sequence() -> None:
    def found(m: Model, x: Tensor) -> Tensor:
        return m.tokens(x) + m.tokens((x > 4).nonzero() % VOCAB).mean((0, 1))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        report = assert_equal_to_one_device(Model(found), {"x": IDS})
    assert report.rewrites["shard_inputs"] == 1


@pytest.mark.parametrize("name", NOT_THE_SEQUENCE)
def test_what_is_not_the_sequence_is_not_where_sharding_starts(name: str) -> None:
    start, inputs = NOT_THE_SEQUENCE[name]
    report = assert_equal_to_one_device(Model(start), inputs)
    assert report.rewrites["shard_inputs"] == 1


@pytest.mark.parametrize(
    ("length", "line"),
    [
        (6, "in 4 chunks of 2, of which the last 2 entries are padding, which nothing reads"),
        (3, "whole: a length of 3 for 4 ranks"),
    ],
)
def test_a_shorter_sequence_is_padded_or_whole(length: int, line: str) -> None:
    def states(m: Model, x: Tensor, encoder: Tensor) -> Tensor:
        return m.tokens(x) + m.norm(encoder).mean(1, keepdim=True)

    report = assert_equal_to_one_device(Model(states), {"x": IDS, "encoder": FEATURES[:, :length]}, ranks=(4,))
    [found] = [line for line in report.lines if line.startswith(("padded:", "whole:"))]
    assert found.endswith(f"starts hidden states {line}")


def test_a_model_that_reads_nothing_of_its_call() -> None:
    with pytest.raises(AutoSPError, match="no sequence found"):
        dry_run(Model(lambda m, x: m.tokens(torch.arange(LENGTH) % VOCAB)[None]), {"x": IDS}, num_ranks=2)


def test_tokens_are_counted_with_a_symbolic_length() -> None:
    ids: Any = IDS.clone()
    torch._dynamo.mark_dynamic(ids, 1)
    report = assert_equal_to_one_device(Model(lambda m, x: m.tokens(x)), {"x": ids})
    assert report.tokens_per_rank == 8
