"""A user's model as training calls it: one argument, one tensor, the same parameters."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fedsieve.errors import FedsieveError
from fedsieve.model.calling import prepared
from fedsieve.model.space import ParamSpace
from fedsieve.model.stack import Stack


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: torch.Tensor


class Reader(nn.Module):
    """Takes arguments by name or by place, and gives whatever it is asked for."""

    def __init__(self, give=lambda logits, hidden: logits) -> None:
        super().__init__()
        self.words, self.out, self.give = nn.Embedding(7, 4), nn.Linear(4, 3), give

    def forward(self, ids, mask):
        hidden = (self.words(ids) * mask[..., None]).mean(1)
        return self.give(self.out(hidden), hidden)


IDS, MASK = torch.arange(12).view(4, 3) % 7, torch.ones(4, 3)
GIVEN = {
    "tensor": (lambda logits, hidden: logits, None),
    "object": (Answer, None),
    "dict": (lambda logits, hidden: {"logits": logits, "hidden": hidden}, None),
    "named": (lambda logits, hidden: Answer(hidden, logits), "hidden"),
    "picked": (lambda logits, hidden: (hidden, logits), lambda found: found[1]),
}


@pytest.mark.parametrize("structure", ["tuple", "dict"])
@pytest.mark.parametrize("kind", GIVEN)
def test_a_model_takes_one_argument_and_gives_one_tensor(kind, structure):
    give, outputs = GIVEN[kind]
    own = Reader(give).train()
    inputs = (IDS, MASK) if structure == "tuple" else {"mask": MASK, "ids": IDS}
    model = prepared(own, inputs, outputs)
    plain = Reader()
    plain.load_state_dict(own.state_dict())
    expected = plain(IDS, MASK)
    assert torch.equal(model(inputs), expected)
    assert torch.equal(model(IDS, MASK), expected) and torch.equal(model(ids=IDS, mask=MASK), expected)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in own.named_parameters()]
    assert own.training and not model.training and not own._forward_hooks and not own._forward_pre_hooks
    assert next(model.parameters()).data_ptr() != next(own.parameters()).data_ptr()


@pytest.mark.parametrize("structure", ["tuple", "dict"])
def test_a_prepared_model_is_stacked(structure):
    inputs = (IDS, MASK) if structure == "tuple" else {"mask": MASK, "ids": IDS}
    model = prepared(Reader(Answer), inputs)
    stack = Stack(model, ParamSpace.of(model, ["out.weight", "out.bias"]), None, clients=3)
    stack.check(inputs)
    assert torch.allclose(stack.trial(inputs)[1], model(inputs), atol=1e-6)


def test_what_does_not_fit_is_said_before_training():
    with pytest.raises(FedsieveError, match=r"the model fails on inputs \(4, 3\) torch.int64: TypeError"):
        prepared(Reader(), IDS)
    with pytest.raises(FedsieveError, match="finds no logits there. Give outputs="):
        prepared(Reader(lambda logits, hidden: (logits, hidden)), (IDS, MASK))
    with pytest.raises(FedsieveError, match="the model gives logits, hidden, and outputs='scores' finds no scores"):
        prepared(Reader(GIVEN["dict"][0]), (IDS, MASK), "scores")
