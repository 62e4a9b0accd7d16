import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedsieve.errors import FedsieveError
from fedsieve.model.space import ParamSpace

shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=6)


def space_of(shapes) -> ParamSpace:
    return ParamSpace(tuple(f"t{number}" for number in range(len(shapes))), tuple(shapes))


@given(shapes, st.integers(0, 3))
def test_flatten_and_unflatten_undo_each_other(shapes, seed):
    space = space_of(shapes)
    torch.manual_seed(seed)
    tensors = {name: torch.randn(shape) for name, shape in zip(space.names, shapes, strict=True)}
    vector = space.flatten(tensors)
    assert vector.shape == (space.size,) == (sum(tensor.numel() for tensor in tensors.values()),)
    for name, tensor in space.unflatten(vector).items():
        assert torch.equal(tensor, tensors[name])
        assert torch.equal(space.view(vector, name), tensors[name])
    assert torch.equal(space.flatten(space.unflatten(vector)), vector)


@given(shapes)
def test_views_write_through_and_clients_stack(shapes):
    space = space_of(shapes)
    stacked = torch.zeros(3, space.size)
    for number, tensor in enumerate(space.unflatten(stacked).values()):
        assert tensor.shape[0] == 3
        tensor[1] = number + 1
    assert (stacked[1] > 0).all() and (stacked[0] == 0).all() and (stacked[2] == 0).all()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2))


def test_the_space_follows_the_model_and_leaves_buffers_out():
    space = ParamSpace.of(model())
    assert space.names == tuple(name for name, _ in model().named_parameters())
    assert space.size == 12 + 4 + 4 + 4 + 8 + 2
    assert ParamSpace.of(model(), ["3.bias", "0.weight"]).names == ("0.weight", "3.bias")


def test_read_and_write_round_trip():
    one, two = model(), model()
    space = ParamSpace.of(one)
    space.write(two, space.read(one) + 1)
    assert torch.equal(space.read(two), space.read(one) + 1)


def test_a_bound_model_and_its_vector_are_one():
    net, reference = model().eval(), model().eval()
    space = ParamSpace.of(net, ["0.weight", "3.weight", "3.bias"])
    theta = space.bind(net)
    inputs = torch.randn(5, 3)
    net(inputs).square().sum().backward()
    reference(inputs).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert torch.equal(theta.grad, space.flatten(expected))
    assert net[0].bias.grad is None and not net[0].bias.requires_grad
    torch.optim.SGD([theta], lr=0.5).step()
    torch.optim.SGD([reference[0].weight, *reference[3].parameters()], lr=0.5).step()
    assert torch.equal(net(inputs), reference(inputs))


def test_what_does_not_fit_is_refused():
    space = ParamSpace.of(model())
    with pytest.raises(FedsieveError, match=r"33 weights does not fit a space of 34"):
        space.unflatten(torch.zeros(33))
    with pytest.raises(FedsieveError, match=r"0\.weight has shape \(4, 4\)"):
        space.flatten({"0.weight": torch.zeros(4, 4)})
    with pytest.raises(FedsieveError, match=r"0\.weight is missing"):
        space.flatten({})
    with pytest.raises(FedsieveError, match="no parameter nothing"):
        ParamSpace.of(model(), ["nothing"])


def test_ids_tell_spaces_apart():
    assert ParamSpace.of(model()).id == ParamSpace.of(model()).id
    ids = {space_of(shapes).id for shapes in ([(2, 3)], [(3, 2)], [(6,)], [(2, 3), ()])}
    assert len(ids) == 4
