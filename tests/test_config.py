import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedsieve.config import FAMILIES, Experiment, load_config, parse_config, to_yaml
from fedsieve.errors import FedsieveError
from fedsieve.runner.listing import LISTINGS

STAGE = "stages: [{name: a, epochs: 1}]\n"


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(FedsieveError) as caught:
        parse_config(text, overrides, where="exp.yaml")
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("file", sorted(Path("configs").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_configs_that_come_with_it_are_valid_and_named_after_their_files(file):
    assert load_config(file).name == file.stem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {sorce: digits}", ["exp.yaml: data.sorce", "unknown key", 'Did you mean "source"?', "Allowed: source"]),
        (
            "data: {transform: crop_flp}",
            ["data.transform", 'Did you mean "crop_flip"?', "Allowed: resize, flip, crop_flip"],
        ),
        ("data: {size: '64'}", ["data.size", "valid integer", "'64'"]),
        ("data: {size: 64.5}", ["data.size", "64.5"]),
        ("data: {val_fraction: 1.0}", ["data.val_fraction", "less than 1"]),
        ("data: {crop_scale: [0.9, 0.5]}", ["data", "crop_scale", "low <= high"]),
        ("data: {classes: [1]}", ["classes", "at least two"]),
        ("seed: true", ["seed", "True"]),
        ("tracking: [tensorbord]", ["tracking.0", 'Did you mean "tensorboard"?']),
        ("checkpoint: {keep: 1}", ["checkpoint.keep", "greater than or equal to 2"]),
        ("data: 3", ["data", "3"]),
        ("device: gpu", ["device", "'gpu'"]),
        ("model: {weights: digits}", ["model.weights", "data.source: digits"]),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(text, said):
    message = refusal(STAGE + text)
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("{name: a, train: hed}", ["stages.a.train", 'Did you mean "head"?', "{last_blocks: N}"]),
        ("{name: a, train: {last_block: 2}}", ["stages.a.train.last_block", 'Did you mean "last_blocks"?']),
        ("{name: a, train: {last_blocks: 0}}", ["stages.a.train.last_blocks", "got 0"]),
        ("{name: a, optimizer: {lr: .inf}}", ["stages.a.optimizer.lr", "finite"]),
        ("{name: a, epochs: 10, warmup_epochs: 11}", ["stages.a", "longer than the stage"]),
        ("{name: a, optimizer: {nesterov: true, momentum: 0}}", ["nesterov", "momentum"]),
        ("{train: head}", ["stages.0.name", "required"]),
        ("{name: a}, {name: a}", ['"a"', "own name"]),
    ],
)
def test_a_wrong_stage_is_named(stage, said):
    message = refusal(f"stages: [{stage}]")
    for words in said:
        assert words in message


def test_every_problem_is_told_at_once():
    message = refusal("stages: [{name: a, epochs: 0}]\ndata: {siez: 3}\nsed: 1")
    assert len(message.splitlines()) == 3


def test_early_stopping_without_validation_is_refused():
    assert "val_fraction is 0" in refusal("stages: [{name: a, early_stopping: 2}]\ndata: {val_fraction: 0}")


def test_a_mistake_in_an_override_is_laid_to_the_command_line():
    assert refusal(STAGE, "data.siz=3").startswith("command line: data.siz: unknown key")
    assert refusal(STAGE, "stages.b.epochs=3").startswith("command line: stages.b.epochs")
    assert refusal(STAGE, "data={siz: 3}").startswith("command line: data.siz: unknown key")
    assert refusal(STAGE + "data: {siz: 3}", "data.size=8").startswith("exp.yaml: data.siz: unknown key")
    assert "key=value" in refusal(STAGE, "data.size")


def test_settings_that_do_not_go_together_are_laid_to_the_override_that_brought_it_about():
    digits = 'model.weights is "digits", which needs data.source: digits'
    assert refusal(STAGE, "seed=3", "model.weights=digits") == f"command line, model.weights=digits: {digits}"
    assert refusal(STAGE + "model: {weights: digits}", "seed=3") == f"exp.yaml: {digits}"
    federated = "federation: {clients: 4}\nstages: [{name: a, rounds: 8}]"
    either = refusal(federated, "stages.a.epochs=3", "stages.0.epochs=2")
    assert either.startswith("command line, stages.a.epochs=3 and stages.0.epochs=2: stages.a.epochs: in a federation")
    nested = refusal(STAGE, "stages=[{name: b, epochs: 1}]", "stages.b.warmup_epochs=2")
    assert nested.startswith("command line")


def test_an_alias_that_holds_itself_and_a_nest_without_end_are_no_yaml():
    for text in ("a: &x [*x]", "a: &x {b: [*x]}", "&x [*x]"):
        assert "line 1: not valid YAML: an alias (*) stands for something that it is itself a part of" in refusal(text)
    assert refusal(STAGE, "data.classes=&x [*x]").startswith(
        "command line: data.classes, line 1: not valid YAML: an alias"
    )
    assert "nested too deep" in refusal(f"a: {3000 * '['}{3000 * ']'}")


SPARSE = "stages: [{name: a, epochs: 1, sparse: true}]\nmask: {rule: random}\n"


def test_a_wrong_layer_kind_is_told_in_one_sentence():
    said = refusal(SPARSE, "mask.kinds=[linear, atention]")
    allowed = "linear, attention, norm, conv, bias, other"
    assert said == (
        f"command line: mask.kinds.1: 'atention' is not allowed. Did you mean \"attention\"? Allowed: {allowed}"
    )
    said = refusal(SPARSE, "mask.kinds=lineer")
    assert said == (
        f"command line: mask.kinds: 'lineer' is not allowed. Did you mean \"linear\"? Allowed: default, all, {allowed}"
    )
    assert refusal(SPARSE.replace("random", "random, kinds: []")).startswith("exp.yaml: mask.kinds: an empty list")
    assert "\n" not in refusal(SPARSE, "mask.kinds=[]")


def test_one_layer_kind_is_a_list_of_one():
    assert parse_config(SPARSE, ["mask.kinds=linear"]).mask.kinds == ["linear"]
    assert parse_config(SPARSE, ["mask.kinds=[norm, bias]"]).mask.kinds == ["norm", "bias"]
    assert parse_config(SPARSE, ["mask.kinds=all"]).mask.kinds == "all"
    assert parse_config(SPARSE).mask.kinds == "default"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("federation.cohort=5", "federation.cohort: 5 clients are asked for, but there are 4"),
        ("federation.held_out=0.3", "federation.cohort: 4 .* there are 4, of which 3 train"),
        ("federation.held_out=0.9", "federation.held_out: 0.9 of 4 clients leaves none to train"),
        ("federation.minimum_replies=5", "federation.minimum_replies: 5 .* a round has 4"),
        ("federation.personal.clients=5", "federation.personal.clients: 5 .* there are 4"),
        ("mask.clients=5", "mask.clients: 5 .* there are 4"),
        ("federation.clients=3", "federation.cohort: 4 .* there are 3"),
    ],
)
def test_more_clients_than_there_are_are_refused_by_key_and_number(override, said):
    assert re.search(said, refusal(SIEVED.replace("clients: 4", "clients: 4, cohort: 4"), override))


FEDERATED = "federation: {clients: 4}\nstages: [{name: a, rounds: 8}]\n"
SIEVED = "federation: {clients: 4}\nmask: {sparsity: 0.5}\nstages: [{name: a, rounds: 8, sparse: true}]\n"
RIDGE = "federation: {clients: 4}\nstages: [{name: a, train: head, method: ridge}]\n"


@pytest.mark.parametrize(
    ("text", "override", "said"),
    [
        (FEDERATED, "stages.a.warmup_epochs=1", "say warmup_rounds"),
        (FEDERATED, "stages.a.warmup_rounds=9", "warmup_rounds (9) is longer than the stage (8 rounds)"),
        (STAGE, "stages.a.warmup_rounds=1", "say warmup_epochs"),
        (STAGE, "stages.a.local={steps: 1}", "local needs a federation, and none is given: say epochs"),
        (FEDERATED, "stages.a.ridge.strength=1.0", "ridge needs method: ridge"),
        (RIDGE, "stages.a.local={steps: 3}", "local needs method: sgd"),
        (RIDGE, "stages.a.early_stopping=3", "early_stopping needs method: sgd"),
        (RIDGE, "stages.a.optimizer.lr=0.5", "optimizer needs method: sgd"),
        (FEDERATED + "executor: sequential\n", "clients_at_once=2", "clients_at_once needs executor: stacked"),
        (SIEVED, "mask={scope: public, clients: 3}", "mask.scope is public"),
        (SIEVED, "mask={rule: random, clients: 3}", "needs no scores of theirs"),
        (SIEVED, "mask.refresh=8", "over after 8 rounds"),
        (SIEVED, "federation.server={optimizer: adam, momentum_correction: reset}", "no mask ever changes"),
        (FEDERATED, "federation.failures.deadline=3.0", "give devices a delay"),
        (
            FEDERATED,
            "federation.server={optimizer: sgd, momentum: 0.5}",
            "momentum belongs to optimizer: momentum or adam",
        ),
        (FEDERATED, "federation.server={optimizer: adagrad, beta2: 0.5}", "beta2 belongs to optimizer: adam or yogi"),
        (
            FEDERATED,
            "federation.correction={kind: fedprox, beta: 2.0}",
            "beta belongs to kind: fedntd, and kind is fedprox",
        ),
        (FEDERATED, "message={up: fp16, group: 128}", "group needs int8"),
        (FEDERATED, "federation.cohort=0", "a whole number of clients, 1 or more, or a share"),
        (FEDERATED, "federation.cohort=1.5", "a whole number of clients, 1 or more, or a share"),
        (FEDERATED, "federation.cohort=some", "got 'some'"),
        (
            FEDERATED,
            "federation.partition={kind: classes, nc: 2, min_size: 9}",
            "min_size belongs to kind: dirichlet or quantity, and kind is classes",
        ),
        (
            FEDERATED,
            "federation.partition={kind: iid, min_size: 9}",
            "min_size belongs to kind: dirichlet or quantity, and kind is iid",
        ),
    ],
)
def test_a_key_that_would_do_nothing_is_refused_with_where_it_works(text, override, said):
    message = refusal(text, override)
    assert said in message and "\n" not in message and "Input" not in message


def test_an_experiment_names_every_conflict_between_its_settings():
    experiment = parse_config(STAGE)
    assert not [*experiment.conflicts()]
    broken = experiment.model_copy(update={"executor": "stacked", "test_curve": True, "test": False})
    assert [sentence.partition(" ")[0] for sentence in broken.conflicts()] == ["test_curve", "executor:"]


CHOICES = {
    "heads": "model.head",
    "transforms": "data.transform",
    "normalize": "data.normalize",
    "interpolation": "data.interpolation",
    "granularity": "mask.granularity",
    "allocation": "mask.allocation",
    "scopes": "mask.scope",
    "methods": "stages.method",
    "schedules": "stages.schedule",
    "weighting": "federation.weighting",
    "personal": "federation.personal.methods",
    "formats": "message.up",
    "aggregations": "privacy.aggregation",
    "executors": "executor",
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_every_word_of_a_family_has_a_text_a_listing_and_code(family):
    [listed] = [entries for place, entries in LISTINGS.values() if place.startswith(f"{family.place}:")]
    assert [name for name, _ in listed(None)] == list(family.words)
    assert all(text for _, text in listed(None)) and family.default in {"", *family.words}
    for word in family.words.values():
        assert word.home is None or callable(word.model_construct().piece)


@pytest.mark.parametrize("listing", CHOICES)
def test_the_words_that_are_listed_are_those_that_a_config_takes(listing):
    def types(annotation):
        """A type, and all types within it."""
        return [annotation, *(inner for part in get_args(annotation) for inner in types(part))]

    found = [Experiment]
    for key in CHOICES[listing].split("."):
        found = [
            kind
            for model in found
            if hasattr(model, "model_fields")
            for kind in types(model.model_fields[key].annotation)
        ]
    words = [word for kind in found if get_origin(kind) is Literal for word in get_args(kind)]
    assert [word for word, _ in LISTINGS[listing][1](None)] == words


def test_a_mistake_in_the_mask_at_the_top_is_told_once():
    """Stages take over what their own masks leave open, mistakes too."""
    text = (
        "mask: {rule: rndom}\nstages: [{name: a, epochs: 1, mask: {sparsity: 0.5}}, {name: b, epochs: 1, sparse: true}]"
    )
    assert refusal(text).startswith("exp.yaml: mask.rule: 'rndom' is not allowed") and "\n" not in refusal(text)
    own = "mask: {rule: random}\nstages: [{name: a, epochs: 1, mask: {rule: rndom}}]"
    assert refusal(own).startswith("exp.yaml: stages.a.mask.rule: 'rndom'") and "\n" not in refusal(own)


def test_a_budget_says_what_it_comes_to():
    (stage,) = parse_config(FEDERATED, ["stages=[{name: a, budget: 13, local: {steps: 4}}]"]).stages
    assert stage.spent == "a budget of 13 local steps at 4 a round is 3 rounds, 12 steps"
    assert parse_config(FEDERATED).stages[0].spent is None


@pytest.mark.parametrize("override", ["mask.calibration_rounds=999999999", f"stages.a.batch_size={10**30}"])
def test_numbers_that_no_machine_can_count_to_are_refused(override):
    assert "less than or equal to" in refusal(SIEVED, override)


@pytest.mark.parametrize("text", ["a: [", "a: 1\na: 2", "[1, 2]", "just words", "", "? {a: 1}\n: 2"])
def test_what_is_no_experiment_is_refused_without_a_traceback(text):
    assert "exp.yaml" in refusal(text)


def test_a_missing_file_a_folder_and_a_binary_are_refused(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    for name, said in (("none.yaml", "no such file"), (".", "is a folder"), ("binary.yaml", "not a text file")):
        with pytest.raises(FedsieveError, match=said):
            load_config(tmp_path / name)


def test_overrides_reach_every_depth():
    experiment = parse_config(
        "stages: [{name: head, train: head}, {name: rest, epochs: 1}]",
        ["data.size=64", "stages.head.epochs=3", "stages.1.optimizer.lr=5e-5", "stages.rest.train.last_blocks=2",
         "data.classes=[1, 2]", "data.cache=null", "model.options={depth: 4}"],
    )  # fmt: skip
    assert experiment.data.size == 64
    assert experiment.stages[0].epochs == 3
    assert experiment.stages[1].optimizer.lr == 5e-5
    assert experiment.stages[1].train.last_blocks == 2
    assert experiment.data.classes == [1, 2]
    assert experiment.model.options == {"depth": 4}
    with pytest.raises(FedsieveError, match="depth:4: a colon needs a space after it"):  # YAML's {"depth:4": null}
        parse_config("stages: [{name: head, train: head}]", ["model.options={depth:4}"])


def test_numbers_and_words_mean_what_they_look_like():
    """YAML 1.1 reads 1e-3 as a text and off as false."""
    experiment = parse_config("name: off\nstages: [{name: a, epochs: 1, optimizer: {lr: 1e-3}}]")
    assert experiment.name == "off"
    assert experiment.stages[0].optimizer.lr == 0.001


sources = st.text(min_size=1).filter(lambda source: source != "none")  # which must name its classes


@given(
    st.builds(
        dict,
        seed=st.integers(0, 2**40),
        data=st.builds(dict, size=st.integers(4, 300), val_fraction=st.floats(0, 0.99), source=sources),
        stages=st.lists(
            st.builds(
                dict,
                name=st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9_.-]{0,9}\Z"),
                epochs=st.integers(1, 9),
                optimizer=st.builds(dict, lr=st.floats(1e-12, 1e3)),
                train=st.sampled_from(["head", "all", {"last_blocks": 2}]),
            ),
            min_size=1,
            unique_by=lambda stage: stage["name"],
        ),
    )
)
@example({"seed": 0, "data": {}, "stages": [{"name": "0E0", "epochs": 1}, {"name": "off", "epochs": 1}]})
def test_a_resolved_config_reads_back_to_itself(tree):
    experiment = Experiment.model_validate(tree)
    assert parse_config(to_yaml(experiment)) == experiment
