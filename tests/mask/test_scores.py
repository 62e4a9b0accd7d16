import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from fedsieve.errors import FedsieveError
from fedsieve.mask import scores
from fedsieve.mask.scores import fisher, fisher_sum, gradient_sum, sample_classes, shrunk
from fedsieve.model.space import ParamSpace

CLASSES, COUNT = 5, 11


@pytest.fixture(autouse=True)
def _one_thread():
    """Tensors this small only lose to threads, most of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def vit() -> nn.Module:
    torch.manual_seed(0)
    options = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 8, "in_chans": 1}
    return timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **options).eval()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, CLASSES)).eval()


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES)).eval()


class Scaled(nn.Module):
    """A bare parameter that stacking takes for one of tokens: such networks are differentiated in other ways."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + torch.rand(width))

    def forward(self, inputs):
        return inputs * self.scale


def odd() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), Scaled(), nn.GELU(), nn.Linear(12, CLASSES)).eval()


MODELS = {"vit": vit, "mlp": mlp, "convolutional": convolutional, "odd": odd}
SUBSETS = {
    "odd": ["1.weight", "2.scale"],
    "vit": ["pos_embed", "blocks.0.attn.qkv.weight", "blocks.0.norm2.bias", "head.weight"],
    "mlp": ["1.weight", "3.bias"],
    "convolutional": ["0.weight", "1.weight"],
}


def images(count: int = COUNT, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def labelled(inputs: torch.Tensor, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of `size`, with labels that go round the classes."""
    return list(zip(inputs.split(size), (torch.arange(len(inputs)) % CLASSES).split(size), strict=True))


def draws(count: int = COUNT, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(count)


def looped(model, space, batches, uniforms, target="log_prob"):
    """The reference: one backward pass for each of `batches`, squared and counted for each of its samples."""
    named = dict(model.named_parameters())
    total, first = torch.zeros(space.size, dtype=torch.float64), 0
    for inputs, labels in batches:
        model.zero_grad()
        logits = model(inputs)
        if uniforms is not None:
            edges = logits.detach().double().softmax(-1).cumsum(-1).numpy()
            part = uniforms[first : first + len(inputs)]
            picks = [
                min(np.searchsorted(edge, u, side="right"), CLASSES - 1) for edge, u in zip(edges, part, strict=True)
            ]
            labels = torch.tensor(picks)
        first += len(inputs)
        values = logits if target == "logit" else F.log_softmax(logits, -1)
        values[range(len(inputs)), labels].mean().backward()
        total += len(inputs) * space.flatten({name: named[name].grad for name in space.names}).double() ** 2
    return total


def assert_near(found, expected, tolerance=1e-5):
    """Near weight by weight; below a millionth of the largest score, rounding of the gradient itself shows."""
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=tolerance * 10, atol=float(expected.max()) * 1e-6
    )
    assert float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_fisher_equals_one_backward_pass_per_sample(name, subset):
    model = MODELS[name]()
    space = ParamSpace.of(model, SUBSETS[name] if subset else None)
    for uniforms in (draws(), None):
        expected = looped(model, space, labelled(images(), 1), uniforms)
        for chunk in (1, 4, 1000) if uniforms is not None else (3,):
            memory = 4 * space.size * chunk
            total, count = fisher_sum(model, space, labelled(images(), 10), uniforms, memory=memory)
            assert count == COUNT and total.dtype == torch.float64
            assert_near(total, expected)


@pytest.mark.parametrize("name", ["vit", "mlp", "odd"])
def test_the_batch_variant_equals_its_loop_and_is_smaller(name):
    model = MODELS[name]()
    space = ParamSpace.of(model)
    total, count = fisher_sum(model, space, labelled(images(), 3), draws(), per="batch")
    assert count == COUNT
    assert_near(total, looped(model, space, labelled(images(), 3), draws()))
    whole = labelled(images(12), 3)  # equal batches: Jensen's inequality holds weight by weight
    by_batch = fisher(model, space, whole, draws(12), per="batch")
    by_sample = fisher(model, space, whole, draws(12))
    assert (by_batch <= by_sample * 1.0001 + 1e-12).all() and by_batch.sum() < by_sample.sum()


def test_a_ragged_last_batch_counts_by_its_size():
    """Two images after a full batch of 64 have a share of 2 in 66, and not one half."""
    model, many, few = mlp(), images(64), images(2, seed=1)
    space, labels = ParamSpace.of(model), torch.arange(66) % CLASSES
    batches = [(many, labels[:64]), (few, labels[64:])]
    full, rest = (fisher(model, space, [batch], None, per="batch") for batch in batches)
    assert rest.sum() > 4 * full.sum()
    assert_near(fisher(model, space, batches, None, per="batch"), (64 * full + 2 * rest) / 66)


@pytest.mark.parametrize("name", ["vit", "mlp"])
def test_the_raw_logit_equals_its_loop(name):
    model = MODELS[name]()
    space = ParamSpace.of(model)
    total, _ = fisher_sum(model, space, labelled(images(), 9), draws(), target="logit")
    assert_near(total, looped(model, space, labelled(images(), 1), draws(), "logit"))


def linear_softmax() -> tuple[nn.Module, ParamSpace, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A linear model, its inputs and probabilities, and its Fisher information worked out by hand.

    The gradient of log p_y by W_ij is ([i = y] - p_i) x_j, so E_y of its square is p_i (1 - p_i) x_j^2.
    """
    torch.manual_seed(0)
    model = nn.Linear(6, CLASSES, bias=False)
    inputs = torch.randn(4, 6)
    p = model(inputs).detach().softmax(-1)
    return model, ParamSpace.of(model), inputs, p, torch.einsum("ni,nj->ij", p * (1 - p), inputs**2).reshape(-1) / 4


def test_the_expectation_over_classes_is_the_analytic_fisher():
    model, space, inputs, p, analytic = linear_softmax()
    total = torch.zeros(space.size, dtype=torch.float64)
    for row, weights in zip(inputs, p, strict=True):
        for label, weight in enumerate(weights):
            total += weight * fisher_sum(model, space, [(row[None], torch.tensor([label]))], None)[0]
    torch.testing.assert_close(total / 4, analytic.double(), rtol=1e-5, atol=1e-9)


def test_sampled_labels_converge_to_the_analytic_fisher():
    model, space, inputs, _, analytic = linear_softmax()
    repeats = 10_000
    many = inputs.repeat(repeats, 1)
    found = fisher(model, space, [(many, torch.zeros(len(many)))], draws(len(many)))
    torch.testing.assert_close(found, analytic, rtol=0.05, atol=0.005)


def test_classes_are_drawn_with_the_frequencies_of_the_softmax():
    logits = torch.tensor([2.0, -1.0, 0.5, -20.0, 1.0])
    count = 50_000
    drawn = sample_classes(logits.expand(count, -1), torch.from_numpy(draws(count)))
    frequencies = torch.bincount(drawn, minlength=CLASSES) / count
    torch.testing.assert_close(frequencies, logits.softmax(-1), rtol=0, atol=0.01)
    edge = torch.tensor([0.0, np.nextafter(1.0, 0.0)])
    assert sample_classes(torch.zeros(2, CLASSES), edge.double()).tolist() == [0, CLASSES - 1]


def test_the_split_into_batches_and_chunks_does_not_matter():
    model = vit()
    space = ParamSpace.of(model)
    whole = fisher(model, space, labelled(images(), COUNT), draws())
    assert whole.dtype == torch.float32 and whole.shape == (space.size,) and (whole >= 0).all()
    for size, memory in ((1, None), (5, None), (COUNT, 3 * 4 * space.size)):
        assert_near(fisher(model, space, labelled(images(), size), draws(), memory=memory), whole)
    # Clients' sums add up to the sum over all of their samples.
    parts = [
        fisher_sum(model, space, labelled(images()[rows], 4), draws()[rows]) for rows in (slice(4), slice(4, COUNT))
    ]
    assert_near(sum(total for total, _ in parts) / sum(count for _, count in parts), whole)


def test_where_memory_does_not_suffice_fewer_are_differentiated_at_a_time(monkeypatch):
    model = vit()
    space = ParamSpace.of(model)
    whole = fisher_sum(model, space, labelled(images(), COUNT), draws())
    asked, make = [], scores._stacked

    def small(*arguments):
        squares = make(*arguments)

        def limited(groups, answers):
            asked.append(len(groups))
            if len(groups) > 3:
                raise torch.cuda.OutOfMemoryError
            return squares(groups, answers)

        return limited

    monkeypatch.setattr(scores, "_stacked", small)
    found = fisher_sum(model, space, labelled(images(), COUNT), draws())
    assert asked == [11, 6, 3, 3, 5, 3, 2] and found[1] == whole[1]
    assert_near(found[0], whole[0])


def test_as_many_are_differentiated_at_a_time_as_fit(monkeypatch):
    """Batches of one size side by side, whatever was loaded at a time; a smaller one by itself."""
    model = vit()
    space = ParamSpace.of(model)
    shapes, make = [], scores._stacked

    def noted(*arguments):
        squares = make(*arguments)
        return lambda groups, answers: (shapes.append(tuple(groups.shape[:2])), squares(groups, answers))[1]

    monkeypatch.setattr(scores, "_stacked", noted)
    fisher_sum(model, space, labelled(images(), 3), draws(), per="batch", memory=2 * 4 * space.size)
    fisher_sum(model, space, labelled(images(), 4), draws(), memory=7 * 4 * space.size)
    assert shapes == [(2, 3), (1, 3), (1, 2), (7, 1), (4, 1)]


def test_scoring_leaves_the_model_as_it_was():
    model = convolutional()
    model[1].train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fisher(model, ParamSpace.of(model, ["0.weight"]), labelled(images(), 8), draws())
    assert model[1].training and not model.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Twice(nn.Module):
    """A module in two places, and a weight that two modules share, beside a parameter that does not stack."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(64, 64), nn.GELU())
        self.again, self.tied = self.layer, nn.Linear(64, 64)
        self.tied.weight = self.layer[0].weight
        self.scaled, self.head = Scaled(64), nn.Linear(64, CLASSES)

    def forward(self, inputs):
        hidden = self.again(self.layer(inputs.flatten(1)))
        return self.head(self.scaled(self.tied(hidden)))


@pytest.mark.parametrize("per", ["sample", "batch"])
def test_modules_that_are_used_twice_are_scored_and_left_as_they_were(per):
    model = Twice()
    space, before = ParamSpace.of(model), dict(model.named_parameters(remove_duplicate=False))
    total, _ = fisher_sum(model, space, labelled(images(), 1), draws(), per=per)
    assert_near(total, looped(model, space, labelled(images(), 1), draws()))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_autocast_gives_nearly_the_same_scores():
    model = vit()
    space = ParamSpace.of(model)
    for per in ("sample", "batch"):
        exact = fisher(model, space, labelled(images(), COUNT), None, per=per)
        half = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
        rough = fisher(model, space, labelled(images(), COUNT), None, per=per, autocast=half)
        assert rough.dtype == torch.float32
        assert torch.corrcoef(torch.stack([exact, rough]))[0, 1] > 0.99


@pytest.mark.parametrize("target", ["log_prob", "logit"])
def test_a_broken_model_is_reported(target):
    model = mlp()
    with torch.no_grad():
        model[4].bias[1] = float("nan")
    with pytest.raises(FedsieveError, match="not finite"):
        fisher(model, ParamSpace.of(model), labelled(images(), 8), draws(), target=target)


@pytest.mark.parametrize(
    ("batches", "uniforms", "options", "message"),
    [
        (labelled(images(), 8), draws(10), {}, "draws are missing"),
        (labelled(images(), 8), draws(12), {}, "12 draws for 11 samples"),
        (labelled(images(), 8), draws() + 1, {}, r"\[0, 1\)"),
        ([(images(3), torch.zeros(2))], None, {}, "labels are missing"),
        ([], None, {}, "no samples"),
        ([], None, {"per": "epoch"}, "Allowed: sample, batch"),
        ([], None, {"target": "loss"}, "Allowed: log_prob, logit"),
    ],
)
def test_what_cannot_be_scored_is_refused(batches, uniforms, options, message):
    model = mlp()
    with pytest.raises(FedsieveError, match=message):
        fisher(model, ParamSpace.of(model), batches, uniforms, **options)


def test_a_space_of_another_model_is_refused():
    with pytest.raises(FedsieveError, match="not one of this model"):
        fisher(mlp(), ParamSpace(("3.bias", "1.weight"), ((12,), (12, 64))), [], None)


@pytest.mark.parametrize("bound", [False, True])
def test_shrinking_changes_the_frozen_weights_and_restores_their_bits(bound):
    model = mlp()
    space = ParamSpace.of(model, ["1.weight", "4.weight"])
    if bound:
        space.bind(model)
    before = space.read(model)
    frozen = torch.rand(space.size, generator=torch.Generator().manual_seed(0)) < 0.5
    for factor in (0.1, 0.0, 1.0):
        with pytest.raises(KeyError), shrunk(model, space, frozen, factor):
            inside = space.read(model)
            assert torch.equal(inside[~frozen], before[~frozen])
            torch.testing.assert_close(inside[frozen], before[frozen] * factor)
            raise KeyError
        assert torch.equal(space.read(model), before)


def test_summed_gradients_are_those_of_one_example_after_another():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    space, inputs, labels = ParamSpace.of(model), torch.randn(7, 5).double(), torch.arange(7) % 3
    found, count = gradient_sum(model, space, [(inputs[:4], labels[:4]), (inputs[4:], labels[4:])])
    total = torch.zeros(space.size, dtype=torch.float64)
    for one, label in zip(inputs, labels, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(one[None]), label[None]).backward()
        total += space.flatten({name: parameter.grad for name, parameter in model.named_parameters()})
    assert count == 7
    torch.testing.assert_close(found, total, rtol=1e-6, atol=1e-9)


def test_labels_that_the_model_does_not_have_are_refused():
    model = nn.Linear(4, 3)
    inputs, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    with pytest.raises(FedsieveError, match="3 classes"):
        fisher(model, ParamSpace.of(model), [(inputs, labels)], None)


def test_a_generator_draws_as_its_numbers_would():
    model = nn.Linear(4, 3)
    batches = [(torch.randn(5, 4), torch.zeros(5).long()), (torch.randn(3, 4), torch.zeros(3).long())]
    space = ParamSpace.of(model)
    given = fisher(model, space, batches, np.random.default_rng(0).random(8))
    assert torch.equal(fisher(model, space, batches, np.random.default_rng(0)), given)
