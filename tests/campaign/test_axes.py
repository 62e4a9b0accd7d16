"""What `--vary` understands, and what it refuses before anything runs."""

from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.conftest import TINY

from fedsieve.campaign.axes import Axis, Space, brief, parse_axis
from fedsieve.errors import FedsieveError

LR = "stages.backbone.optimizer.lr"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "tiny.yaml"
    file.write_text(TINY)
    return file


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("mask.sparsity=0.5,0.9,0.99", (0.5, 0.9, 0.99)),
        ("k=1e-3, 1", (1e-3, 1)),
        ("k=[1, 2]", (1, 2)),  # with the brackets that YAML would have
        ("k=[1, 2],[3]", ([1, 2], [3])),
        ("stages.0.train=head,{last_blocks: 2}", ("head", {"last_blocks": 2})),
        ("device=cuda:0,cuda:1", ("cuda:0", "cuda:1")),
        ("k=true,false", (True, False)),
    ],
)
def test_lists_are_yaml(text, choices):
    assert parse_axis(text).choices == choices


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.booleans(), st.floats(0, 1))
def test_a_range_keeps_its_ends_and_what_is_drawn_lies_between(one, two, log, share):
    low, high = sorted((one, two))
    assume(low < high * (1 - 1e-12))
    axis = parse_axis(f"a.b={'log:' * log}{low!r}:{high!r}")
    assert (axis.low, axis.high, axis.log, axis.choices) == (low, high, log, ())
    value = axis.tidy(low + share * (high - low))
    assert low <= value <= high and 0 <= axis.position(value) <= 1
    assert axis.position(low) == 0 and axis.position(high) == 1


def test_points_of_a_range_are_even_on_its_scale(config):
    for spec, points in ((f"{LR}=log:1e-3:1:4", (0.001, 0.01, 0.1, 1.0)), (f"{LR}=0.1:0.4:4", (0.1, 0.2, 0.3, 0.4))):
        (axis,) = Space(config, [spec], "grid").axes
        assert axis.choices == points


@pytest.mark.parametrize(
    ("spec", "ends"),
    [
        ("stages.backbone.epochs=1:8", (1, 8)),
        ("stages.backbone.optimizer.momentum=0:0.9", (0.0, 0.9)),
        ("stages.backbone.warmup_epochs=0:2", (0.0, 2.0)),  # takes fractions, however its ends are written
        ("stages.backbone.epochs=1:8:3", (1, 4, 8)),
        ("stages.backbone.warmup_epochs=0:2:5", (0.0, 0.5, 1.0, 1.5, 2.0)),
    ],
)
def test_whole_numbers_are_drawn_only_where_nothing_else_is_taken(config, spec, ends):
    (axis,) = Space(config, [spec], "bayes").axes
    assert axis.ends == ends and [type(end) for end in axis.ends] == [type(end) for end in ends]


@settings(max_examples=25)
@given(
    st.lists(st.floats(1e-6, 10), min_size=2, max_size=4, unique_by=lambda v: f"{v!r}"),
    st.lists(st.integers(1, 50), min_size=2, max_size=4, unique=True),
)
def test_a_grid_is_every_combination_and_each_reaches_its_config(config, rates, epochs):
    vary = [f"{LR}={','.join(map(repr, rates))}", f"stages.0.epochs={','.join(map(str, epochs))}"]
    space = Space(config, vary, "grid", ["seed=7"])
    assert [tuple(values.values()) for values in space.grid] == list(product(sorted(rates), sorted(epochs)))
    for values in space.grid:
        experiment = space.configure(values)
        assert (experiment.stages[1].optimizer.lr, experiment.stages[0].epochs) == tuple(values.values())
        assert experiment.seed == 7 and not experiment.test and space.configure(values, final=True).test
        assert space.values(space.params(values)) == values


@pytest.mark.parametrize(
    ("vary", "method", "said"),
    [
        ([], "bayes", "nothing varies"),
        (["stages.backbone.optimizer.lr"], "bayes", "not of the form KEY=VALUES"),
        ([f"{LR}=log:0:1"], "bayes", "must lie above 0"),
        ([f"{LR}=1:0.1"], "bayes", "the lower end comes first"),
        ([f"{LR}=uniform:0:1"], "bayes", "is not understood"),
        ([f"{LR}=log:1e-3"], "bayes", "is not understood"),
        ([f"{LR}=0.1"], "bayes", "varies nothing"),
        ([f"{LR}=0.1,0.10"], "bayes", "names a value twice"),
        ([f"{LR}=0.1,0.2", f"{LR}=1,2"], "bayes", "given twice"),
        ([f"{LR}=log:1e-3:1"], "grid", "a grid needs points"),
        ([f"{LR}=log:1e-3:1:1"], "grid", "from 2 to"),
        ([f"{LR}=0:0.9:-3"], "grid", "from 2 to 10,000 points, got -3"),
        ([f"{LR}=0:0.9:2.5"], "grid", "from 2 to 10,000 points, got 2.5"),
        (["stages.backbone.optimiser.lr=0.1,1"], "grid", 'Did you mean "optimizer"?'),
        (["stages.bakcbone.optimizer.lr=0.1,1"], "grid", 'Did you mean "backbone"?'),
        ([f"{LR}=0.1,-1"], "bayes", f"command line: {LR}"),
        (["stages.head.train=head,haed"], "bayes", 'Did you mean "head"?'),
        (["seed=0,1"], "grid", "seed differs between trials"),
        (["data.val_fraction=0.1,0.2"], "bayes", "data.val_fraction differs between trials"),
        ([f"{LR}=log:1e-3:1:200", "stages.0.batch_size=1:100:100"], "grid", "20,000 combinations"),
    ],
)
def test_what_makes_no_sweep_is_refused_in_a_sentence(config, vary, method, said):
    with pytest.raises(FedsieveError) as error:
        Space(config, vary, method)
    assert said in str(error.value) and error.value.exit_code == 2


@pytest.mark.parametrize(
    ("vary", "overrides", "said"),
    [
        (["stages.0.optimizer.lr=1,2", "stages.head.optimizer.lr=3,4"], [], "--vary stages.0.optimizer.lr would"),
        (["stages.0.epochs=1,2", "stages.00.epochs=3,4"], [], "--vary stages.0.epochs would"),
        (["stages.0.optimizer.lr=1,2", "stages.head.optimizer={lr: 3},{lr: 4}"], [], "--vary stages.0.optimizer.lr would"),
        ([f"{LR}=0.1,0.2"], [f"{LR}=0.7"], f"{LR}=0.7 would do nothing: --vary {LR} sets it too"),
        ([f"{LR}=0.1,0.2"], ["stages.1.optimizer.lr=0.7"], "stages.1.optimizer.lr=0.7 would"),
        ([f"{LR}=0.1,0.2"], ["stages.1.name=last", "stages.last.optimizer.lr=1"], '"backbone" is not there'),
        (["stages.last.epochs=1,2"], ["stages.backbone.epochs=3", "stages.1.name=last"], "stages.backbone.epochs=3 would"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_is_refused_whatever_its_name(config, vary, overrides, said):
    with pytest.raises(FedsieveError) as error:
        Space(config, vary, "grid", overrides)
    assert said in str(error.value) and error.value.exit_code == 2


def test_a_part_of_what_was_set_may_vary(config):
    section, part = "stages.0.optimizer={lr: 1, momentum: 0.5}", "stages.head.optimizer.lr=3,4"
    (axis,) = Space(config, [part], "grid", [section]).axes
    assert axis.choices == (3, 4)
    two = Space(config, ["stages.0.optimizer={lr: 1, momentum: 0.5},{lr: 1}", part], "grid").grid
    assert len(two) == 4


def test_without_validation_data_there_is_nothing_to_choose_by(config):
    with pytest.raises(FedsieveError, match="no validation data to choose settings by"):
        Space(config, [f"{LR}=0.1,1"], "grid", ["data.val_fraction=0"])


def test_an_end_is_where_a_better_value_may_lie_beyond():
    choices = Axis("k", choices=(0.1, 0.2, 0.3))
    assert [choices.at_end(value) for value in choices.choices] == [True, False, True]
    drawn = Axis("k", low=1e-3, high=1.0, log=True)
    assert [drawn.at_end(value) for value in (1e-3, 0.0012, 0.03, 0.9)] == [True, True, False, True]
    assert not Axis("k", choices=("a", "b", "c")).at_end("a") and not Axis("k", choices=(1, 2)).at_end(1)


def test_brief_names_are_the_shortest_that_differ():
    keys = ["stages.head.optimizer.lr", "stages.backbone.optimizer.lr", "mask.sparsity"]
    assert brief(keys) == ["head.optimizer.lr", "backbone.optimizer.lr", "sparsity"]
