"""prepare_autosp_inputs keeps DeepSpeed's signature and errors."""

import inspect

import pytest
import torch

from autosp_rules import prepare_autosp_inputs

IDS = torch.zeros(2, 8, dtype=torch.long)


def test_signature_is_deepspeeds() -> None:
    parameters = inspect.signature(prepare_autosp_inputs).parameters
    assert list(parameters) == ["input_id", "label_id", "position_id", "attention_mask", "seq_dim"]
    assert parameters["seq_dim"].default == 1


def test_returns_the_four_marked_and_tagged() -> None:
    ids, labels, positions, mask = prepare_autosp_inputs(IDS.clone(), IDS.clone(), attention_mask=IDS.clone())
    assert positions is None
    assert labels is not None
    assert mask is not None
    assert [ids.tag, labels.tag, mask.tag] == ["input_id", "label_id", "attention_mask"]
    assert all(1 in tensor._dynamo_weak_dynamic_indices for tensor in (ids, labels, mask))


def test_ids_are_required_and_labels_are_not() -> None:
    assert prepare_autosp_inputs(IDS.clone())[1:] == (None, None, None)
    with pytest.raises(ValueError, match="input_id is required"):
        prepare_autosp_inputs(None, IDS)


@pytest.mark.parametrize("seq_dim", [2, -1])
def test_dimension_out_of_range(seq_dim: int) -> None:
    with pytest.raises(ValueError, match=f"seq_dim {seq_dim} is not a dimension of input_id"):
        prepare_autosp_inputs(IDS, IDS, seq_dim=seq_dim)


def test_nothing_is_marked_when_one_tensor_is_wrong() -> None:
    ids = IDS.clone()
    with pytest.raises(ValueError, match="attention_mask"):
        prepare_autosp_inputs(ids, IDS, attention_mask=torch.ones(8))
    assert not hasattr(ids, "tag")


def test_a_length_that_the_model_treats_otherwise_compiles_again() -> None:
    mask = torch.ones(8, 8).tril()  # at its full length, what is taken of it is the mask itself, which is contiguous

    def model(ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        return (ids[:, :, None] * ids[:, None]).masked_fill(mask[:length, :length] == 0, 0.0)

    step = torch.compile(model, backend="eager", fullgraph=True)
    for length in (5, 8, 7):
        ids = torch.ones(2, length)
        prepare_autosp_inputs(ids)
        assert torch.equal(step(ids), torch.ones(2, length, length).tril())
