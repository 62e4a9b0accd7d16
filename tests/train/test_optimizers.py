import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedsieve.errors import FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.train.optimizers import SparseAdamW, SparseSGDM

STEPS = 6
SGD = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "weight_decay": 0.03},
    {"momentum": 0.8, "nesterov": True},
    {"momentum": 0.8, "nesterov": True, "weight_decay": 0.03},
]
ADAM = [{"weight_decay": 0.0}, {"weight_decay": 0.1}, {"betas": (0.7, 0.9), "eps": 1e-6}]
BOTH = [(SparseSGDM, torch.optim.SGD, options) for options in SGD]
BOTH += [(SparseAdamW, torch.optim.AdamW, options) for options in ADAM]


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small only lose to threads, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.GELU(), nn.Flatten(), nn.Linear(45, 7), nn.LayerNorm(7))


def random_mask(space: ParamSpace, density: float = 0.3, seed: int = 0) -> Mask:
    return Mask.from_bool(space, torch.rand(space.size, generator=torch.Generator().manual_seed(seed)) < density)


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS, seed: int = 1) -> None:
    """A user's own loop, on data drawn by `seed`."""
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(6, 2, 5, 5, generator=source)
        labels = torch.randint(7, (6,), generator=source)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def masked_dense(optimizer_class, theta, gradients, active, options, lr):
    """The reference: a dense torch optimizer run on the active weights' own trajectory, the rest put back."""
    weights = nn.Parameter(theta.clone())
    optimizer = optimizer_class([weights], lr=lr, fused=False, foreach=False, **options)
    for gradient in gradients:
        weights.grad = gradient * active
        optimizer.step()
        with torch.no_grad():
            weights.copy_(torch.where(active, weights, theta))
    return weights.detach(), optimizer.state[weights]


@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize(("sparse", "dense", "options"), BOTH)
def test_a_mask_of_ones_equals_torch_bit_for_bit(sparse, dense, options, ones):
    found, expected = network(), network()
    mask = Mask.ones(ParamSpace.of(found)) if ones else None
    descend(found, sparse(found, mask, lr=0.05, **options), 25)
    descend(expected, dense(expected.parameters(), lr=0.05, fused=False, foreach=False, **options), 25)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("sparse", "dense", "options"), BOTH)
def test_frozen_weights_keep_their_bits_and_active_ones_move(sparse, dense, options):
    model = network()
    space = ParamSpace.of(model)
    mask, before = random_mask(space), space.read(model)
    descend(model, sparse(model.named_parameters(), mask, lr=0.05, **{"weight_decay": 0.5} | options))
    after, active = space.read(model), mask.to_bool()
    assert torch.equal(before[~active], after[~active])
    assert (before[active] != after[active]).float().mean() > 0.9


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 200),
    st.floats(0, 1),
    st.integers(0, 1000),
    st.floats(1e-4, 1.0),
    st.sampled_from(BOTH),
)
def test_k_entries_of_state_equal_the_masked_dense_state(size, density, seed, lr, case):
    sparse, dense, options = case
    source = torch.Generator().manual_seed(seed)
    theta = torch.randn(size, generator=source)
    mask = random_mask(ParamSpace(("w",), ((size,),)), density, seed)
    gradients = [torch.randn(size, generator=source) for _ in range(5)]
    active, index = mask.to_bool(), mask.indices()

    vector = theta.clone().requires_grad_()
    optimizer = sparse(vector, mask, lr=lr, **options)
    for gradient in gradients:
        vector.grad = gradient
        optimizer.step()
    expected, state = masked_dense(dense, theta, gradients, active, options, lr)

    assert torch.equal(vector.detach()[~active], theta[~active])
    torch.testing.assert_close(vector.detach(), expected, rtol=1e-6, atol=1e-6)
    for name, value in optimizer.state[vector].items():
        if value.dim():
            assert value.shape == (mask.count,)
            torch.testing.assert_close(value, state[name][index], rtol=1e-6, atol=1e-6)


def test_a_bound_vector_a_model_and_a_list_take_the_same_steps():
    models = [network() for _ in range(4)]
    space = ParamSpace.of(models[0], ["0.weight", "3.weight", "3.bias"])
    mask = random_mask(space)
    named = dict(models[2].named_parameters())
    params = [space.bind(models[0]), models[1], [named[name] for name in space.names], models[3].named_parameters()]
    vectors = []
    for model, given_params in zip(models, params, strict=True):
        optimizer = SparseSGDM(given_params, mask, lr=0.1, weight_decay=0.01)
        descend(model, optimizer)
        assert optimizer.state_bytes() == (4 * mask.count, 8 * mask.count)
        vectors.append(ParamSpace.of(model).read(model))
    for vector in vectors[1:]:
        torch.testing.assert_close(vectors[0], vector)


def test_adamw_holds_two_buffers_of_k_entries():
    model = network()
    mask = random_mask(ParamSpace.of(model))
    optimizer = SparseAdamW(model, mask)
    descend(model, optimizer, 1)
    assert optimizer.state_bytes().state == 2 * 4 * mask.count


def one_step(gradient, active, **options):
    """The step -theta that one lr-1 step from 0 makes."""
    theta = torch.zeros(len(gradient)).requires_grad_()
    mask = Mask.from_bool(ParamSpace(("w",), ((len(gradient),),)), active)
    optimizer = SparseSGDM(theta, mask, lr=1.0, momentum=0, **options)
    theta.grad = gradient.clone()
    optimizer.step()
    assert torch.equal(theta.grad, gradient)
    return -theta.detach()


def test_clipping_looks_only_at_active_gradients():
    gradient, active = torch.tensor([3.0, 4.0, 1000.0]), torch.tensor([True, True, False])
    torch.testing.assert_close(one_step(gradient, active, clip_norm=10.0), torch.tensor([3.0, 4.0, 0.0]))
    torch.testing.assert_close(one_step(gradient, active, clip_norm=1.0), torch.tensor([0.6, 0.8, 0.0]))


def test_rescaling_restores_the_dense_norm_up_to_its_cap():
    gradient, active = torch.tensor([3.0, 4.0, 12.0]), torch.tensor([True, True, False])
    torch.testing.assert_close(one_step(gradient, active, rescale=10.0).norm(), torch.tensor(13.0))
    torch.testing.assert_close(one_step(gradient, active, rescale=2.0), torch.tensor([6.0, 8.0, 0.0]))
    both = one_step(gradient, active, rescale=10.0, clip_norm=1.0)
    torch.testing.assert_close(both, torch.tensor([0.6, 0.8, 0.0]))
    assert torch.equal(one_step(torch.tensor([0.0, 0.0, 1.0]), active, rescale=2.0), torch.zeros(3))
    assert torch.equal(one_step(torch.zeros(3), active, rescale=2.0), torch.zeros(3))


def test_without_a_mask_clipping_equals_torch_clipping():
    found, expected = network(), network()
    optimizer = SparseSGDM(found, lr=0.1, clip_norm=0.1)
    descend(found, optimizer, 1)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)

    def clip(*_):
        nn.utils.clip_grad_norm_(expected.parameters(), 0.1)

    reference.register_step_pre_hook(clip)
    descend(expected, reference, 1)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 100), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.sampled_from([0.0, 0.2, 0.7, 1.0, None]))
def test_a_new_mask_carries_reset_or_scaled_momentum(seed, before, after):
    space = ParamSpace.of(network(), ["0.weight", "3.bias"])
    old, new = random_mask(space, before, seed), None if after is None else random_mask(space, after, seed + 1)
    new_bool = torch.ones(space.size, dtype=torch.bool) if new is None else new.to_bool()
    both = old.to_bool() & new_bool
    share = float(both.sum() / max(1, new_bool.sum()))
    for correction in ("keep", "scale", "reset"):
        model = network()
        optimizer = SparseSGDM(model.named_parameters(), old, lr=0.1, momentum_correction=correction)
        descend(model, optimizer, 2)
        first = torch.zeros(space.size)
        first[old.indices()] = torch.cat([optimizer.state[tensor]["momentum_buffer"] for tensor in optimizer._params])
        optimizer.set_mask(new)
        if correction == "reset":
            assert not optimizer.state
        else:
            carried = torch.zeros(space.size)
            parts = [optimizer.state[tensor]["momentum_buffer"].reshape(-1) for tensor in optimizer._params]
            carried[new_bool] = torch.cat(parts)
            torch.testing.assert_close(carried, first * both * (1 if correction == "keep" else share))
        frozen = space.read(model)[~new_bool]
        descend(model, optimizer, 2)
        assert torch.equal(frozen, space.read(model)[~new_bool])


@pytest.mark.parametrize("sparse", [SparseSGDM, SparseAdamW])
def test_a_saved_state_continues_bit_for_bit(sparse):
    model = network()
    mask = random_mask(ParamSpace.of(model))
    optimizer = sparse(model, mask, lr=0.05)
    descend(model, optimizer, 3)
    other = copy.deepcopy(model)
    resumed = sparse(other, mask, lr=0.9)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    descend(model, optimizer, 3, seed=2)
    descend(other, resumed, 3, seed=2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    stranger = sparse(other, random_mask(ParamSpace.of(model), seed=9), lr=0.05)
    with pytest.raises(FedsieveError, match="another mask"):
        stranger.load_state_dict(optimizer.state_dict())


def test_schedulers_set_the_rate():
    model = network()
    optimizer = SparseSGDM(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    descend(model, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_zero_grad_keeps_a_bound_vector_bound():
    model = network()
    theta = ParamSpace.of(model).bind(model)
    optimizer = SparseSGDM(theta, lr=0.1)
    before = theta.detach().clone()
    optimizer.zero_grad()
    descend(model, optimizer, 1)
    assert not torch.equal(before, theta)
    assert torch.equal(ParamSpace.of(model).read(model), theta)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda model, mask: SparseSGDM(list(model.parameters())[:2], mask, lr=0.1), "do not match"),
        (lambda model, mask: SparseSGDM(list(model.named_parameters())[:2], mask, lr=0.1), "not among"),
        (lambda model, mask: SparseSGDM([{"params": list(model.parameters())}], mask, lr=0.1), "one group"),
        (lambda model, mask: SparseSGDM(model, mask, lr=0.1).add_param_group({"params": []}), "one group"),
        (lambda model, mask: SparseSGDM(model.to(memory_format=torch.channels_last), mask, lr=0.1), "contiguous"),
        (lambda model, mask: SparseSGDM(model, mask, lr=0.1, momentum=0, nesterov=True), "momentum"),
        (lambda model, mask: SparseSGDM(model, mask, lr=0.1, momentum_correction="drop"), "Allowed: reset"),
        (lambda model, mask: SparseSGDM(model, mask, lr=-1), "lr"),
        (lambda model, mask: SparseAdamW(model, mask, clip_norm=0), "clip_norm"),
        (lambda model, mask: SparseAdamW(model, mask, betas=(0.9, 1.0)), "betas"),
    ],
)
def test_what_cannot_work_is_refused(build, message):
    model = network()
    with pytest.raises(FedsieveError, match=message):
        build(model, Mask.ones(ParamSpace.of(model)))


def test_a_mask_of_another_space_of_the_same_size_is_refused():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    first, second = (ParamSpace.of(model, [f"{name}.weight"]) for name in "ab")
    with pytest.raises(FedsieveError):
        SparseSGDM(model, Mask.ones(first), lr=0.1).set_mask(Mask.ones(second))
    with pytest.raises(FedsieveError, match="another space"):
        SparseSGDM(first.bind(model), Mask.ones(second), lr=0.1)
