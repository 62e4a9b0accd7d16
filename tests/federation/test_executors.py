"""The executors agree with each other, and the sequential one with torch's own optimizer on plain modules."""

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedsieve.config import Correction, Data, Local, Model, Optimizer
from fedsieve.data.store import ImageStore
from fedsieve.data.transforms import HALF, make_transform
from fedsieve.errors import FedsieveError
from fedsieve.federation.executors import Cohort, Sequential, Stacked, Task, make_executor, stacked
from fedsieve.federation.work import Draws, local_work
from fedsieve.model.build import build_classifier
from fedsieve.model.layers import _Gelu, gelu
from fedsieve.model.scheme import WAYS
from fedsieve.model.space import ParamSpace
from fedsieve.model.stack import Stack
from fedsieve.train.feed import Feed

VIT = {"patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2}
SIZES = [7, 3, 11, 4]  # images of each client: uneven, and one with fewer than a batch


class Double(nn.Module):
    """A network in float64 that takes float32 images."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net.double()

    def forward(self, images):
        return self.net(images.double())


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
]


def make_task(
    optimizer=None, correction="none", transform="crop_flip", double=True, backbone=None, size=16, device="cpu"
) -> Task:
    rng = np.random.default_rng(0)
    count = sum(SIZES)
    images = torch.from_numpy(rng.integers(0, 256, (count, 3, 12, 12), dtype=np.uint8))
    labels = torch.from_numpy(rng.integers(0, 5, count))
    config = Data(source="digits", size=size, transform=transform)
    store, labels = ImageStore(images, torch.device(device)), labels.to(device)
    feed = Feed(store, make_transform(config, *HALF), np.arange(count), labels)
    name, options = backbone or ("vit_tiny_patch16_224", VIT)
    net = build_classifier(Model(backbone=name, weights="none", options=options), classes=5, size=size, seed=0)
    model = (Double(net) if double else net).to(device)
    space = ParamSpace.of(model)
    theta = space.bind(model)
    optimizer = optimizer or Optimizer(lr=0.1, weight_decay=0.01)
    pull = {"mu": 0.3} if correction == "fedprox" else {}
    return Task(model, space, theta, feed, optimizer, Correction(kind=correction, **pull), nullcontext)


def make_works(task: Task, local: Local, batch: int = 4, round: int = 0):
    bounds = np.cumsum([0, *SIZES])
    return [
        local_work(client, np.arange(*bounds[client : client + 2]), local, batch, Draws(task.feed, 1, ("stage", round)))
        for client in range(len(SIZES))
    ]


def run(task: Task, kind: str, support, cohort: Cohort, clients: int = 4, rate: float = 0.1):
    executor = Sequential(task, support) if kind == "sequential" else Stacked(task, support, clients, 4)
    results = list(executor.train(cohort, rate))
    moved = torch.cat([result.moved for result in results])
    sums = torch.cat([result.sums for result in results])
    gradients = [result.gradients for result in results if result.gradients is not None]
    return moved, sums, torch.cat(gradients) if gradients else None


def some(space: ParamSpace, share: float) -> torch.Tensor:
    drawn = torch.from_numpy(np.random.default_rng(5).random(space.size)) < share
    return drawn.nonzero().squeeze(1)


CASES = {
    "sgd": {},
    "nesterov": {"optimizer": Optimizer(lr=0.1, nesterov=True)},
    "adamw": {"optimizer": Optimizer(kind="adamw", lr=0.1, weight_decay=0.1)},
    "clipped": {"optimizer": Optimizer(lr=0.1, clip_norm=0.1)},
    "rescaled": {"optimizer": Optimizer(lr=0.1, rescale=5.0, clip_norm=1.0)},
    "fedprox": {"correction": "fedprox"},
    "scaffold": {"correction": "scaffold"},
    "fedntd": {"correction": "fedntd"},
}


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_executors_agree(case, held, share):
    """Uneven clients, several epochs, masks of single clients, and cohorts larger than what is stacked at a time."""
    found = {}
    for kind, clients in (("sequential", 1), ("stacked", 4), ("stacked", 3)):
        task = make_task(**CASES[case])
        support = None if share == 1 else some(task.space, share)
        start = task.theta.detach().clone() if support is None else task.theta.detach()[support]
        cohort = Cohort(make_works(task, Local(epochs=2)), start)
        if held:
            cohort.holds = torch.from_numpy(np.random.default_rng(1).random((4, len(start))) < 0.5)
            cohort.start = start + 0.01 * torch.from_numpy(np.random.default_rng(2).normal(size=(4, len(start))))
        if case == "scaffold":
            cohort.control = 0.1 * torch.from_numpy(np.random.default_rng(3).normal(size=(4, len(start))))
        found[kind, clients] = run(task, kind, support, cohort, clients)
        if held:
            assert (found[kind, clients][0][~cohort.holds] == 0).all()
    reference = found.pop(("sequential", 1))
    assert reference[0].norm(dim=1).min() > 0
    for moved, sums, gradients in found.values():
        assert (moved - reference[0]).norm() / reference[0].norm() < 1e-10
        torch.testing.assert_close(sums, reference[1])
        if gradients is not None:
            torch.testing.assert_close(gradients, reference[2])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rate", [0.01, 0.1])
def test_executors_agree_in_half_precision(rate, device):
    """Both come as near to training in float64 as bf16 lets them."""
    found = {}
    for kind, double in (("sequential", True), ("sequential", False), ("stacked", False)):
        task = make_task(optimizer=Optimizer(lr=rate), double=double, device=device)
        if not double:
            task = replace(task, autocast=lambda: torch.autocast(device, torch.bfloat16))
        support = some(task.space, 0.1).to(device)
        cohort = Cohort(make_works(task, Local(epochs=2)), task.theta.detach()[support])
        found[kind, double] = run(task, kind, support, cohort, rate=rate)[0].double()
    reference = found.pop(("sequential", True))
    for moved in found.values():
        assert (moved - reference).norm() / reference.norm() < 0.05


@pytest.mark.parametrize("local", [Local(steps=1), Local(steps=5), Local(epochs=3)])
def test_a_client_trains_as_torch_would(local):
    task = make_task(double=False)
    works = make_works(task, local)
    start = task.theta.detach().clone()
    moved, sums, _ = run(task, "sequential", None, Cohort(works, start))
    for client, work in enumerate(works):
        reference = make_task(double=False)
        optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        loss_sum = count = 0.0
        for rows, draws in zip(work.examples, work.draws, strict=True):
            there = rows >= 0
            images = reference.feed.store.images[torch.from_numpy(rows[there])]
            inputs = reference.feed.transform.train(images, torch.from_numpy(draws[there]))
            loss = F.cross_entropy(reference.model(inputs), reference.feed.labels[torch.from_numpy(rows[there])])
            for parameter in reference.model.parameters():
                parameter.grad.zero_()
            loss.backward()
            optimizer.step()
            loss_sum, count = loss_sum + loss.item() * there.sum(), count + there.sum()
        torch.testing.assert_close(moved[client], reference.space.read(reference.model) - start, rtol=1e-4, atol=1e-6)
        assert sums[client, 0].item() == pytest.approx(loss_sum, rel=1e-5)
        assert sums[client, 2].item() == count


def not_true(logits, labels):
    """The logits without each image's own class."""
    others = torch.arange(logits.shape[-1]) != labels[:, None]
    return logits[others].view(len(logits), -1)


ADAMW = Optimizer(kind="adamw", lr=0.02, momentum=0.6, beta2=0.7, weight_decay=0.1)
PAPERS = {
    "sgd": (Optimizer(lr=0.1, momentum=0.7, weight_decay=0.01), Correction()),
    "nesterov": (Optimizer(lr=0.1, momentum=0.7, weight_decay=0.01, nesterov=True), Correction()),
    "adamw": (ADAMW, Correction()),
    "clipped": (Optimizer(lr=0.1, clip_norm=0.5), Correction()),
    "fedprox": (Optimizer(lr=0.1), Correction(kind="fedprox", mu=0.9)),
    "fedntd": (Optimizer(lr=0.1), Correction(kind="fedntd", beta=0.6, tau=2.5)),
    "scaffold": (Optimizer(lr=0.1), Correction(kind="scaffold")),
}


@pytest.mark.parametrize("case", PAPERS)
def test_local_training_matches_torch_and_the_papers(case):
    """Reference: torch's own optimizer on the loss the paper states, differentiated by autograd, in float64.

    Both executors share these formulas, so comparing them with each other would not notice a wrong one.
    """
    settings, correction = PAPERS[case]
    task = replace(make_task(optimizer=settings, size=8), correction=correction)
    works, theta = make_works(task, Local(steps=4)), task.theta.detach().clone()
    control = 0.1 * torch.from_numpy(np.random.default_rng(0).normal(size=(len(works), task.space.size)))
    cohort = Cohort(works, theta, control=control if case == "scaffold" else None)
    moved, _, gradients = run(task, "sequential", None, cohort, rate=settings.lr)
    received = {name: tensor.detach().clone() for name, tensor in task.model.named_parameters()}
    for client, work in enumerate(works):
        weights = {name: tensor.clone().requires_grad_() for name, tensor in received.items()}
        options = {"lr": settings.lr, "weight_decay": settings.weight_decay, "foreach": False}
        if settings.kind == "adamw":
            optimizer = torch.optim.AdamW(weights.values(), betas=(settings.momentum, settings.beta2), **options)
        else:
            optimizer = torch.optim.SGD(
                weights.values(), momentum=settings.momentum, nesterov=settings.nesterov, **options
            )
        total = torch.zeros_like(theta)
        for rows, draws in zip(work.examples, work.draws, strict=True):
            images, labels = task.feed.fetch(rows[rows >= 0])
            inputs = task.feed.inputs(images, torch.from_numpy(draws[rows >= 0]))
            logits = torch.func.functional_call(task.model, weights, (inputs,))
            loss = F.cross_entropy(logits, labels)
            if case == "fedprox":
                away = sum((weights[name] - received[name]).square().sum() for name in weights)
                loss = loss + correction.mu / 2 * away
            if case == "fedntd":
                teacher = torch.func.functional_call(task.model, received, (inputs,))
                ours, theirs = (not_true(values, labels) / correction.tau for values in (logits, teacher))
                apart = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="batchmean")
                loss = loss + correction.beta * correction.tau**2 * apart
            optimizer.zero_grad()
            loss.backward()
            total += task.space.flatten({name: weights[name].grad for name in task.space.names})
            if case == "scaffold":
                for name, change in task.space.unflatten(control[client]).items():
                    weights[name].grad += change
            if settings.clip_norm:
                torch.nn.utils.clip_grad_norm_(weights.values(), settings.clip_norm)
            optimizer.step()
        expected = task.space.flatten({name: weights[name].detach() for name in task.space.names}) - theta
        assert (moved[client] - expected).norm() < 1e-9 * expected.norm()
        if case == "scaffold":
            assert (gradients[client] - total / work.steps).norm() < 1e-9 * total.norm()


def test_the_model_is_as_before_after_a_cohort():
    task = make_task()
    before = task.theta.detach().clone()
    run(task, "sequential", None, Cohort(make_works(task, Local(epochs=1)), before + 0.1))
    assert torch.equal(task.theta.detach(), before)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize("backbone", ["vit_tiny_patch16_224", "resnet18", "deit3_small_patch16_224"])
def test_a_stack_equals_its_networks_one_by_one(backbone, share):
    """Outputs and gradients, for plain transformers, tokens, layer scales, convolutions and BatchNorm."""
    options = {"layers": [1, 1, 1, 1], "channels": [8, 16, 32, 64]} if backbone == "resnet18" else VIT
    net = build_classifier(Model(backbone=backbone, weights="none", options=options), 5, 32, 0).double()
    net.requires_grad_(False)
    space = ParamSpace.of(net)
    support = None if share == 1 else some(space, share)
    base = space.read(net)
    k = space.size if support is None else len(support)
    generator = torch.Generator().manual_seed(0)
    values = (base if support is None else base[support]) + 0.02 * torch.randn(3, k, generator=generator).double()
    stack = Stack(net, space, support, 3)
    images = torch.randn(6, 3, 32, 32, generator=generator).double()
    stack.check(images[:2])
    stack.load(values)
    together = stack(images)
    gradients = stack.gather(stack.gradients(together.square().sum()), values)
    for client in range(3):
        theta = base.clone()
        theta[... if support is None else support] = values[client]
        theta.requires_grad_()
        alone = torch.func.functional_call(net, space.unflatten(theta), (images[2 * client : 2 * client + 2],))
        (gradient,) = torch.autograd.grad(alone.square().sum(), theta)
        torch.testing.assert_close(together[2 * client : 2 * client + 2], alone)
        torch.testing.assert_close(gradients[client], gradient if support is None else gradient[support])


def test_a_network_that_cannot_be_stacked_trains_one_client_after_another():
    task = make_task(backbone=("convnext_atto", {"depths": [1, 1, 1, 1], "dims": [4, 4, 4, 4]}), size=32)
    with pytest.warns(UserWarning, match="cannot be stacked"):
        executor = make_executor("stacked", task, None, 4, 4, print)
    assert isinstance(executor, Sequential)
    moved = [
        result.moved
        for result in executor.train(Cohort(make_works(task, Local(steps=1)), task.theta.detach().clone()), 0.1)
    ]
    assert len(moved) == 4 and all(part.norm() > 0 for part in moved)


SWIN = ("swin_tiny_patch4_window7_224", {"embed_dim": 8, "depths": (2,), "num_heads": (2,), "window_size": 4})


@pytest.mark.parametrize("way", ["layers", "whole"])
@pytest.mark.parametrize(("case", "share"), [("sgd", 1.0), ("rescaled", 0.1), ("fedntd", 0.1), ("scaffold", 1.0)])
def test_mapped_modules_train_as_one_client_after_another(case, share, way):
    """Windows and relative positions, uneven clients, and cohorts larger than what is stacked at a time."""
    moved = {}
    for kind in ("sequential", way):
        task = make_task(**CASES[case], backbone=SWIN, size=32)
        support = None if share == 1 else some(task.space, share)
        start = task.theta.detach().clone() if support is None else task.theta.detach()[support]
        control = None
        if case == "scaffold":
            control = 0.1 * torch.from_numpy(np.random.default_rng(3).normal(size=(4, len(start))))
        executor = Sequential(task, support) if kind == "sequential" else Stacked(task, support, 3, 4, print, way)
        cohort = Cohort(make_works(task, Local(epochs=1)), start, control=control)
        moved[kind] = torch.cat([result.moved for result in executor.train(cohort, 0.1)])
    assert moved["sequential"].norm(dim=1).min() > 0
    assert (moved[way] - moved["sequential"]).norm() / moved["sequential"].norm() < 1e-10


@pytest.mark.parametrize("way", ["layers", "whole"])
def test_mapped_modules_train_alike_in_half_precision(way):
    found = []
    for kind, double in (("sequential", True), ("sequential", False), (way, False)):
        task = make_task(backbone=SWIN, size=32, double=double)
        if not double:
            task = replace(task, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
        executor = Sequential(task, None) if kind == "sequential" else Stacked(task, None, 4, 4, print, way)
        cohort = Cohort(make_works(task, Local(epochs=1)), task.theta.detach().clone())
        found.append(torch.cat([result.moved for result in executor.train(cohort, 0.05)]).double())
    reference, *others = found
    for moved in others:
        assert (moved - reference).norm() / reference.norm() < 0.05


def test_the_first_way_that_is_right_is_taken_and_the_layer_without_a_rule_is_named():
    task = make_task(backbone=SWIN, size=32)
    with pytest.warns(UserWarning, match=r"attn \(WindowAttention\) has relative_position_bias_table.*docs/design.md"):
        executor = stacked(task, None, 3, 4, print, WAYS)
    assert executor.way == "layers"
    assert stacked(make_task(), None, 3, 4, print, WAYS).way == "rules"


def test_on_a_cpu_modules_are_not_mapped():
    """`bench networks` shows that it is slower there than one client after another."""
    with pytest.warns(UserWarning, match="cannot be stacked"):
        assert isinstance(make_executor("stacked", make_task(backbone=SWIN, size=32), None, 3, 4, print), Sequential)


def test_a_layer_that_looks_linear_but_is_not_is_found_out():
    class Odd(nn.Linear):
        def forward(self, inputs):
            return F.linear(inputs, self.weight.abs(), self.bias)

    net = nn.Sequential(nn.Flatten(), Odd(12, 3))
    with pytest.raises(FedsieveError, match="Odd.* is no layer"):
        Stack(net.requires_grad_(False), ParamSpace.of(net), None, 2)


def test_a_sound_network_is_stacked_however_much_half_precision_costs_it():
    """Trained networks amplify rounding; that two ways of rounding differ says nothing about stacking."""

    class Steep(nn.Sequential):
        def forward(self, images):
            return self[1](torch.sin(300 * self[0](images.flatten(1)).float()))

    torch.manual_seed(0)
    net = Steep(nn.Linear(3 * 16 * 16, 8), nn.Linear(8, 5)).requires_grad_(False)
    space = ParamSpace.of(net)
    task = replace(make_task(double=False), model=net, space=space, theta=space.bind(net))
    task = replace(task, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    inputs, _ = task.feed.batch(np.arange(2))
    exact = net(inputs)
    with task.autocast():
        assert (net(inputs) - exact).norm() > 0.05 * exact.norm()
    assert isinstance(make_executor("stacked", task, some(space, 0.1), 3, 4, print), Stacked)


def test_steps_take_batches_from_as_many_epochs_as_they_need():
    task = make_task()
    work = local_work(0, np.arange(7), Local(steps=5), 4, Draws(task.feed, 1, ("stage", 0)))
    assert work.examples.shape == (5, 4)
    assert sorted(work.examples[:2][work.examples[:2] >= 0]) == list(range(7))  # an epoch is two steps, 4 and 3 images
    assert sorted(work.examples[2:4][work.examples[2:4] >= 0]) == list(range(7))
    again = local_work(0, np.arange(7), Local(steps=2), 4, Draws(task.feed, 1, ("stage", 0)))
    assert (again.examples == work.examples[:2]).all()
    other = local_work(0, np.arange(7), Local(steps=2), 4, Draws(task.feed, 1, ("stage", 1)))
    assert (again.examples != other.examples).any()
    assert local_work(0, np.arange(7), Local(epochs=4), 4, Draws(task.feed, 1, ("s", 0)), share=0.25).steps == 2


def test_clients_draw_their_own_orders_and_augmentations():
    task, images = make_task(), np.arange(24)
    one, other = (
        local_work(client, images, Local(epochs=2), 4, Draws(task.feed, 1, ("stage", 0))) for client in (0, 1)
    )
    assert sorted(one.examples.ravel()) == sorted(other.examples.ravel()) == sorted([*images, *images])
    for drawn in ("examples", "draws"):
        assert (getattr(one, drawn) != getattr(other, drawn)).mean() > 0.4


def test_stacked_weights_have_the_type_that_autocast_computes_in():
    """Another one would be cast in every step, and together with it make sums as wide as float32."""
    task = replace(make_task(double=False), autocast=lambda: torch.autocast("cpu", torch.float16))
    stack = Stacked(task, None, clients=2, batch=3).stack
    norms = [name for name in stack.leaves if "norm" in name]
    assert norms and {stack.leaves[name].dtype for name in norms} == {torch.float32}
    assert {leaf.dtype for name, leaf in stack.leaves.items() if name not in norms} == {torch.float16}
    with task.autocast(), torch.no_grad():
        seen = []
        task.model.backbone.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        stack(torch.cat([task.feed.batch(np.arange(3))[0]] * 2))
    assert seen == [torch.float16]


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=20))
def test_the_quick_gelu_and_its_gradient_are_those_of_torch(values):
    inputs = torch.tensor(values, requires_grad=True)
    pairs = []
    for function in (_Gelu.apply, F.gelu):
        outputs = function(inputs)
        pairs.append((outputs.detach(), *torch.autograd.grad(outputs.sum(), inputs)))
    for own, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-6, atol=2e-6)


def test_the_quick_gelu_is_for_compilers():
    """Run as it is, it would take twenty passes over the widest values of the network."""
    codes, inputs = [], torch.randn(7)
    compiled = torch.compile(gelu, backend=lambda graph, _: codes.append(graph.code) or graph.forward)
    torch.testing.assert_close(compiled(inputs), gelu(inputs), rtol=1e-6, atol=2e-6)
    assert "exp2" in codes[0]
    assert torch.equal(gelu(inputs), F.gelu(inputs))


def test_checking_whether_a_network_stacks_compiles_nothing():
    task = make_task(double=False)
    stack = Stack(task.model, task.space, None, clients=2)

    def compiled(*inputs):
        raise AssertionError("the check went through the compiled network")

    stack.network = compiled
    stack.check(task.feed.batch(np.arange(2))[0])


@pytest.mark.parametrize(("kind", "clients"), [("sequential", 1), ("stacked", 2), ("stacked", 3)])
def test_rows_are_made_for_as_many_clients_as_train_at_a_time(kind, clients):
    """What differs between clients takes memory for those who train now, not for the cohort."""
    task = make_task()
    start, asked = task.theta.detach().clone(), []
    rows = start + 0.01 * torch.from_numpy(np.random.default_rng(2).normal(size=(4, len(start))))
    holds = torch.from_numpy(np.random.default_rng(1).random((4, len(start))) < 0.5)

    def made(values):
        return lambda members: (asked.append(len(members)), values[members.start : members.stop])[1]

    works = make_works(task, Local(epochs=1))
    whole = run(task, kind, None, Cohort(works, rows, holds), clients)
    lazy = run(make_task(), kind, None, Cohort(works, made(rows), made(holds)), clients)
    assert torch.equal(whole[0], lazy[0]) and max(asked) == clients and sum(asked) == 2 * 4


def test_attention_biases_train():
    """timm computes with those of an earlier pass in eval mode."""
    small = {"embed_dim": (16, 24, 32), "depth": (1, 1, 1), "num_heads": (1, 1, 1), "key_dim": 8}
    task = make_task(backbone=("levit_128s", small), size=128)
    noise = torch.randn(task.space.size, generator=torch.Generator().manual_seed(0))  # timm begins with gates at zero
    start = task.theta.detach() + 0.05 * noise
    moved, _, _ = run(task, "sequential", None, Cohort(make_works(task, Local(steps=2)), start))
    biases = [name for name in task.space.names if "attention_biases" in name]
    assert biases and all(task.space.view(moved, name).flatten(1).any(1).all() for name in biases)
