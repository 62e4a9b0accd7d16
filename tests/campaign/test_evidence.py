"""From run folders to numbers: what counts, what does not, and what claims become."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp
from tests.conftest import TINY

from fedsieve.campaign.definition import ClaimSpec, Row
from fedsieve.campaign.engine import FAILED, Outcome, read_outcome
from fedsieve.campaign.evidence import TRIES, RowResult, Tried, agreement, choose, judge, next_settings
from fedsieve.campaign.tables import make_table, series_of
from fedsieve.config import parse_config, to_yaml
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.report.masks import pairs
from fedsieve.report.measuring import spent
from fedsieve.report.series import overlap
from fedsieve.wire.ledger import COLUMNS

TINY_EXPERIMENT = parse_config(TINY)
ROW = Row("group/row", "a row", {}, (), {}, {}, None, False, frozenset())
ROUNDS = "stages=[{name: head, train: head, rounds: 1}, {name: backbone, train: backbone, sparse: true, rounds: 2}]"
accuracies = st.lists(st.floats(0, 1), min_size=1, max_size=6)


class Given(RowResult):
    """A result of known values."""

    def __init__(self, values):
        super().__init__(ROW, None, [], [])
        self.given = values

    def by_seed(self, name):
        return self.given


def finished(folder: Path, accuracy=0.5, experiment=TINY_EXPERIMENT) -> Path:
    """What a finished run leaves, as far as it counts here."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(experiment))
    (folder / "summary.json").write_text(
        json.dumps({"test_accuracy": accuracy, "stages": {"head": {}, "backbone": {}}})
    )
    return folder


# --- what counts -----------------------------------------------------------------------------------------------------


def test_only_a_finished_run_of_the_same_config_counts(tmp_path):
    assert read_outcome(tmp_path / "none", TINY_EXPERIMENT).state == "not run"
    assert read_outcome(finished(tmp_path / "done"), TINY_EXPERIMENT).state == "finished"
    (finished(tmp_path / "killed") / "summary.json").unlink()
    assert read_outcome(tmp_path / "killed", TINY_EXPERIMENT).state == "unfinished"
    (finished(tmp_path / "torn") / "summary.json").write_text('{"test_accuracy": 0.')
    assert read_outcome(tmp_path / "torn", TINY_EXPERIMENT).state == "damaged"
    (finished(tmp_path / "nan") / "summary.json").write_text('{"test_accuracy": null, "stages": {}}')
    assert read_outcome(tmp_path / "nan", TINY_EXPERIMENT).state == "damaged"
    (finished(tmp_path / "config") / "config.yaml").write_text("stages: [")
    assert read_outcome(tmp_path / "config", TINY_EXPERIMENT).state == "damaged"
    other = parse_config(TINY, ["stages.head.optimizer.lr=0.2"])
    changed = read_outcome(finished(tmp_path / "other", experiment=other), TINY_EXPERIMENT)
    assert changed.state == "another config" and "stages.head.optimizer.lr (0.2 there, 0.1 here)" in changed.reason
    (finished(tmp_path / "diverged") / FAILED).write_text('{"reason": "stage diverged"}')
    assert read_outcome(tmp_path / "diverged", TINY_EXPERIMENT).state == "diverged"
    (finished(tmp_path / "failed") / FAILED).write_text("")
    failed = read_outcome(tmp_path / "failed", TINY_EXPERIMENT)
    assert (failed.state, failed.reason) == ("damaged", "failed.json is damaged")
    (finished(tmp_path / "folder") / "config.yaml").unlink()
    gone = read_outcome(tmp_path / "folder", TINY_EXPERIMENT)
    assert (gone.state, gone.reason) == ("damaged", "config.yaml is gone")
    (tmp_path / "folder" / "config.yaml").mkdir()
    assert read_outcome(tmp_path / "folder", TINY_EXPERIMENT).state == "damaged"


def test_a_finished_run_that_lost_records_is_damaged(tmp_path):
    """Best values, steadiness and drift would be made of what is left."""
    run = finished(tmp_path / "run")
    (run / "summary.json").write_text('{"test_accuracy": 0.5, "stages": {"head": {"epochs": 3}}}')
    records = [json.dumps({"stage": "head", "index": epoch, "epoch": epoch}) + "\n" for epoch in (1, 2, 3)]
    for count, state in ((3, "finished"), (2, "damaged"), (0, "damaged")):
        (run / "metrics.jsonl").write_text("".join(records[:count]))
        outcome = read_outcome(run, TINY_EXPERIMENT)
        assert outcome.state == state and (count == 3 or f"{count} of the 3 epochs" in outcome.reason)


def test_a_finished_run_whose_ledger_lost_messages_is_damaged(tmp_path):
    run, ledger = finished(tmp_path / "run"), tmp_path / "run" / "ledger.csv"
    (run / "summary.json").write_text('{"test_accuracy": 0.5, "stages": {}, "bytes_up": 7, "bytes_down": 5}')
    lines = [COLUMNS, "head,1,3,down,weights,5,ok", "head,1,3,up,update,7,ok"]
    for kept, reason in (
        (lines, ""),
        (lines[:2], "ledger.csv is damaged: 0 of the 7 bytes sent up"),
        ([lines[0], lines[2]], "ledger.csv is damaged: 0 of the 5 bytes sent down"),
    ):
        ledger.write_text("\n".join(kept) + "\n")
        outcome = read_outcome(run, TINY_EXPERIMENT)
        assert outcome.reason == reason and outcome.state == ("damaged" if reason else "finished")
    ledger.unlink()
    assert read_outcome(run, TINY_EXPERIMENT).reason == "ledger.csv is missing: 0 of the 7 bytes sent up"


def test_where_a_run_was_computed_makes_it_no_other(tmp_path):
    elsewhere = parse_config(TINY, ["device=auto", "data.cache=/elsewhere", "tracking=[tensorboard]"])
    assert read_outcome(finished(tmp_path / "run", experiment=elsewhere), TINY_EXPERIMENT).state == "finished"


def test_what_is_missing_is_never_averaged(tmp_path):
    outcomes = []
    for seed, accuracy in enumerate([0.5, 0.7, 0.9]):
        experiment = parse_config(TINY, [f"seed={seed}"])
        folder = finished(tmp_path / str(seed), accuracy, experiment)
        if seed == 2:
            (folder / "summary.json").write_text('{"test_accuracy": "high"}')
        outcomes.append(read_outcome(folder, experiment))
    result = RowResult(ROW, TINY_EXPERIMENT, [], outcomes)
    assert result.by_seed("test_accuracy") == {0: 0.5, 1: 0.7}
    assert result.mean("test_accuracy") == pytest.approx(0.6)
    assert result.spread("test_accuracy") == pytest.approx(np.std([0.5, 0.7], ddof=1))
    assert result.state.startswith("seed 2 damaged")
    assert result.mean("bytes") is None and result.spread("bytes") is None


def test_agreement_of_clients_masks_is_that_of_every_pair_and_computed_once_per_run(tmp_path, monkeypatch):
    experiment = parse_config(
        TINY, ["federation={clients: 3}", "mask={rule: random, sparsity: 0.5, scope: client}", ROUNDS]
    )
    names = ["backbone.cls_token", *(f"backbone.blocks.{block}.mlp.fc1.weight" for block in range(6)), "head.weight"]
    space = ParamSpace(tuple(names), ((50,),) * 8)
    active = torch.rand(3, space.size, generator=torch.Generator().manual_seed(0)) < torch.linspace(
        0.2, 0.9, space.size
    )
    run = finished(tmp_path / "run", experiment=experiment)
    (run / "masks").mkdir()
    for client, mask in enumerate(active):
        Mask.from_bool(space, mask).save(run / "masks" / f"backbone.client-{client}.safetensors")
    count = Mock(wraps=pairs)
    monkeypatch.setattr("fedsieve.report.folder.pairs", count)
    result = RowResult(ROW, experiment, [], [read_outcome(run, experiment)])

    def mean(parts):
        found = [[(a & b).sum() / (a | b).sum() for a, b in itertools.combinations(part, 2)] for part in parts]
        return pytest.approx(float(np.mean(found)), rel=1e-5)

    per_block = active.view(3, 8, 50).transpose(0, 1)
    assert result.mean("jaccard") == mean([active])
    assert result.mean("jaccard_deep") == mean(per_block[5:7])
    assert result.mean("jaccard_deep") - result.mean("jaccard_deepens") == mean(per_block[1:3])
    assert 0.2 < result.mean("jaccard_chance") < result.mean("jaccard")
    assert "<svg" in overlap({"random": result.runs}) and count.call_count == 1
    lost = run / "masks" / "backbone.client-1.safetensors"
    lost.write_bytes(b"damaged")
    with pytest.warns(UserWarning, match=r"client-1.*left out"):
        assert RowResult(ROW, experiment, [], [read_outcome(run, experiment)]).mean("jaccard") is None
    lost.unlink()
    messages = [COLUMNS, *(f"backbone,1,{client},up,update,7,ok" for client in range(3))]
    (run / "ledger.csv").write_text("\n".join(messages) + "\n")
    with pytest.warns(UserWarning, match=r"2 of 3 clients' masks are there.*left out"):
        assert RowResult(ROW, experiment, [], [read_outcome(run, experiment)]).mean("jaccard") is None
    assert (
        RowResult(ROW, experiment, [], [read_outcome(finished(tmp_path / "none"), TINY_EXPERIMENT)]).mean("jaccard")
        is None
    )


# --- choosing settings -----------------------------------------------------------------------------------------------


def tried(settings, accuracy):
    state = "diverged" if accuracy is None else "finished"
    return Tried(settings, Outcome(Path(), 0, state), -1.0 if accuracy is None else accuracy)


def search(tune, truth):
    """All that is tried for a row whose settings have accuracies `truth(settings)`."""
    trials = []
    while (settings := next_settings(tune, trials, smoke=False)) is not None:
        trials.append(tried(settings, truth(settings)))
    return trials


@given(st.floats(-9, 3), st.lists(st.integers(-8, 0).map(lambda n: n / 2), min_size=2, max_size=4, unique=True))
def test_rates_are_widened_until_the_best_lies_inside_or_enough_were_tried(best, exponents):
    rates = [10**exponent for exponent in exponents]
    trials = search(
        {"stages.all.optimizer.lr": rates}, lambda s: -abs(math.log10(s["stages.all.optimizer.lr"]) - best) + 99
    )
    found = [trial.settings["stages.all.optimizer.lr"] for trial in trials]
    assert found[: len(rates)] == rates and len(set(found)) == len(found)
    chosen = max(trials, key=lambda trial: trial.accuracy).settings["stages.all.optimizer.lr"]
    assert len(found) >= TRIES or min(found) < chosen < max(found)


def test_a_plateau_on_the_way_up_does_not_end_the_search():
    found = {0.003: 0.304, 0.01: 0.312, 0.03: 0.344, 0.1: 0.341, 0.333: 0.38, 1.11: 0.42, 3.7: 0.35}
    tune = {"stages.main.optimizer.lr": [0.003, 0.01, 0.03]}
    trials = search(tune, lambda settings: found[settings["stages.main.optimizer.lr"]])
    assert [trial.settings["stages.main.optimizer.lr"] for trial in trials] == list(found)


def test_where_no_rate_taught_anything_higher_ones_are_tried():
    found = {0.003: 0.0064, 0.01: 0.0072, 0.03: 0.007, 0.1: 0.01, 0.333: 0.0266, 1.11: 0.48, 3.7: 0.3}  # chance is 0.01
    tune = {"stages.edit.optimizer.lr": [0.003, 0.01, 0.03]}
    trials = search(tune, lambda settings: found[settings["stages.edit.optimizer.lr"]])
    assert [trial.settings["stages.edit.optimizer.lr"] for trial in trials] == list(found)
    falling = search(tune, lambda settings: 0.01 if settings["stages.edit.optimizer.lr"] < 0.05 else None)
    assert [trial.accuracy for trial in falling] == [0.01, 0.01, 0.01, -1.0, 0.01]  # and one below them


def test_other_settings_are_tried_as_they_are_given_and_diverged_ones_are_not_chosen():
    tune = {"mask.sparsity": [0.5, 0.9], "mask.rule": ["random", "high_magnitude"]}
    trials = search(tune, lambda s: None if s["mask.rule"] == "random" else s["mask.sparsity"])
    assert [tuple(trial.settings.values()) for trial in trials] == list(itertools.product(*tune.values()))
    assert RowResult(ROW, TINY_EXPERIMENT, trials, []).chosen == {"mask.sparsity": 0.9, "mask.rule": "high_magnitude"}
    assert RowResult(ROW, TINY_EXPERIMENT, [tried({"x.lr": 1.0}, None)], []).chosen == {}


def test_the_first_of_equally_good_settings_is_chosen():
    trials = [tried({"mask.sparsity": value}, accuracy) for value, accuracy in ((0.5, 0.6), (0.7, 0.8), (0.9, 0.8))]
    assert RowResult(ROW, TINY_EXPERIMENT, trials, []).chosen == {"mask.sparsity": 0.7}


def test_a_trial_that_is_not_over_widens_nothing():
    waiting = replace(tried({"x.lr": 0.1}, 0.5), outcome=Outcome(Path(), 0, "unfinished"), accuracy=None)
    assert next_settings({"x.lr": [0.1, 0.2]}, [waiting, tried({"x.lr": 0.2}, 0.9)], smoke=False) is None


def test_a_choice_at_the_edge_is_told():
    trials = [tried({"x.lr": rate}, accuracy) for rate, accuracy in ((0.1, 0.5), (0.2, 0.6), (0.3, 0.9))]
    assert RowResult(ROW, TINY_EXPERIMENT, trials, []).at_edge
    assert not RowResult(ROW, TINY_EXPERIMENT, [*trials, tried({"x.lr": 0.4}, 0.1)], []).at_edge


# --- claims ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=6))
def test_a_claim_is_judged_by_the_t_interval_of_the_paired_difference(pairs):
    claim = ClaimSpec(says="a beats b", above=["a", "b"])
    results = {
        name: Given(dict(enumerate(column))) for name, column in zip("ab", zip(*pairs, strict=True), strict=False)
    }
    verdict = judge(claim, results)
    apart = np.array([a - b for a, b in pairs])
    if len(pairs) < 2:
        assert verdict.word == ("cannot be told" if pairs else "not run") and verdict.interval is None
        return
    assert verdict.difference == pytest.approx(apart.mean()) and verdict.seeds == len(pairs)
    if apart.std() > 1e-9:
        reference = ttest_1samp(apart, 0.0)
        assert verdict.interval == pytest.approx(tuple(reference.confidence_interval(0.95)), abs=1e-9)
        if abs(reference.pvalue - 0.05) > 1e-6:
            sure = "holds" if apart.mean() > 0 else "does not hold"
            assert verdict.word == (sure if reference.pvalue < 0.05 else "cannot be told")


def test_only_seeds_that_both_rows_have_are_compared():
    results = {"a": Given({0: 0.5, 1: 0.6, 2: 0.9}), "b": Given({1: 0.5, 2: 0.8, 3: 0.0})}
    verdict = judge(ClaimSpec(says="", above=["a", "b"]), results)
    assert (verdict.seeds, verdict.word) == (2, "holds") and verdict.difference == pytest.approx(0.1)


def test_equal_with_every_seed_is_not_above():
    results = dict.fromkeys("ab", Given({0: 0.5, 1: 0.6}))
    assert judge(ClaimSpec(says="", above=["a", "b"]), results).word == "does not hold"


def test_where_seeds_make_no_difference_one_tells():
    def of(value):
        result = Given({0: value})
        result.row = replace(ROW, seeds=1)
        return result

    claim = ClaimSpec(says="", above=["a", "b"])
    assert judge(claim, {"a": of(2.0), "b": of(1.0)}).word == "holds"
    assert judge(claim, {"a": of(1.0), "b": of(2.0)}).word == "does not hold"
    assert judge(claim, {"a": of(2.0), "b": Given({0: 1.0})}).word == "cannot be told"


def recorded(folder: Path, *fields: dict[str, float]) -> RowResult:
    """A finished run whose last stage has these records."""
    lines = [
        json.dumps({"stage": "backbone", "index": at, "epoch": at} | more) + "\n" for at, more in enumerate(fields, 1)
    ]
    (finished(folder) / "metrics.jsonl").write_text("".join(lines))
    return RowResult(ROW, TINY_EXPERIMENT, [], [read_outcome(folder, TINY_EXPERIMENT)])


@pytest.mark.parametrize("found", [{1: (0.9, 0.2), 2: (0.3, 0.8)}, {1: (0.3, 0.8), 2: (0.9, 0.2)}])
def test_settings_are_chosen_on_validation_whatever_the_test_accuracies_are(found, tmp_path):
    def experiment(row, settings):
        return parse_config(TINY, [f"stages.head.epochs={settings.get('stages.head.epochs', 1)}"])

    def attempt(settings, folder, experiment):
        validated, tested = found[settings["stages.head.epochs"]]
        told = {"val_accuracy": validated, "test_accuracy": tested, "stages": {"head": {}, "backbone": {}}}
        (finished(folder, experiment=experiment) / "summary.json").write_text(json.dumps(told))

    study = SimpleNamespace(
        smoke=False,
        tune=lambda row, experiment: {"stages.head.epochs": [1, 2]},
        experiment=lambda row, seed, settings=None: experiment(row, settings or {}),
        search=experiment,
    )
    trials, chosen = choose(study, ROW, tmp_path, attempt)
    assert [trial.accuracy for trial in trials] == [validated for validated, _ in found.values()]
    assert found[chosen["stages.head.epochs"]] == (0.9, 0.2)


@pytest.mark.parametrize("evaluations", [9, 10, 12])
@pytest.mark.parametrize("slope", [0.0, 0.03])
def test_steadiness_is_of_the_last_ten_evaluations_about_a_line_and_of_no_fewer(evaluations, slope, tmp_path):
    last = [0.4, 0.6, 0.45, 0.5, 0.4, 0.6, 0.5, 0.45, 0.6, 0.4]
    accuracies = [0.0] * (evaluations - 10) + [value + slope * at for at, value in enumerate(last)]
    result = recorded(tmp_path / "run", *({"val_accuracy": value} for value in accuracies[:evaluations]))
    residual = np.std(last - np.polyval(np.polyfit(range(10), last, 1), range(10)))
    assert result.mean("steadiness") == (None if evaluations < 10 else pytest.approx(residual))


def test_a_run_that_still_rises_is_not_unsteady_for_that(tmp_path):
    result = recorded(tmp_path / "run", *({"val_accuracy": 0.1 + 0.05 * at} for at in range(10)))
    assert result.mean("steadiness") == pytest.approx(0, abs=1e-12)


def test_seconds_do_not_tell_what_only_the_first_row_of_a_process_computes(tmp_path):
    alike = [{"seconds": 2.0}, {"seconds": 2.1}, {"seconds": 1.9}]
    one = recorded(tmp_path / "one", {"seconds": 60.0}, *alike)
    two = recorded(tmp_path / "two", {"seconds": 2.0}, *alike)
    assert one.mean("last.seconds") == pytest.approx(4 * 2.05) and two.mean("last.seconds") == pytest.approx(4 * 2.0)
    assert recorded(tmp_path / "short", {"seconds": 60.0}).mean("last.seconds") is None
    rising = [{"val_accuracy": accuracy} for accuracy in (0.1, 0.4, 0.6, 0.7)]
    first, later = (
        recorded(
            tmp_path / name, *(time | seen for time, seen in zip([{"seconds": start}, *alike], rising, strict=True))
        )
        for name, start in (("first", 60.0), ("later", 2.0))
    )
    assert first.mean("seconds_to_50") == pytest.approx(3 * 2.05)
    assert later.mean("seconds_to_50") == pytest.approx(3 * 2.0)
    assert spent(first.runs[0], "seconds") == pytest.approx(2.05 * np.arange(1, 5))
    assert recorded(tmp_path / "one round", {"seconds": 60.0, "val_accuracy": 0.6}).mean("seconds_to_50") is None


def test_the_gain_of_a_stage_is_over_the_stage_before_it(tmp_path):
    stages = {"head": {"test_accuracy": 0.5}, "base": {"test_accuracy": 0.7}, "main": {"test_accuracy": 0.75}}
    three = "stages=[{name: head, train: head, epochs: 1}, {name: base, epochs: 1}, {name: main, epochs: 1}]"
    for names in (list(stages), ["head", "base"]):
        experiment = parse_config(
            TINY, [three] if len(names) == 3 else [three.replace(", {name: main, epochs: 1}", "")]
        )
        folder = finished(tmp_path / str(len(names)), experiment=experiment)
        told = {"test_accuracy": stages[names[-1]]["test_accuracy"], "stages": {name: stages[name] for name in names}}
        (folder / "summary.json").write_text(json.dumps(told))
        result = RowResult(ROW, experiment, [], [read_outcome(folder, experiment)])
        assert result.mean("gain") == pytest.approx(0.05 if len(names) == 3 else 0.2)


def test_rows_that_ran_without_the_measure_are_not_called_not_run(tmp_path):
    run = read_outcome(finished(tmp_path / "run"), TINY_EXPERIMENT)
    ran = RowResult(ROW, TINY_EXPERIMENT, [], [run])
    claim = ClaimSpec(says="", above=["a", "b"], measure="steadiness")
    assert judge(claim, {"a": ran, "b": ran}).word == "cannot be told"
    assert judge(claim, {"a": ran, "b": RowResult(ROW, None, [], [])}).word == "not run"


@pytest.mark.parametrize(
    ("values", "word"),
    [([0.001, -0.001, 0.0], "holds"), ([0.1, 0.11, 0.12], "does not hold"), ([0.0, 0.05, -0.05], "cannot be told")],
)
def test_level_means_within_the_margin_for_sure(values, word):
    results = {"a": Given(dict(enumerate(values))), "b": Given(dict.fromkeys(range(3), 0.0))}
    assert judge(ClaimSpec(says="", level=["a", "b"], within=0.01), results).word == word


def test_no_worse_does_not_mind_better():
    claim = ClaimSpec(says="", no_worse=["a", "b"], within=0.01)
    for gap, word in ((0.2, "holds"), (-0.005, "holds"), (-0.2, "does not hold")):
        results = {"a": Given({0: 0.5 + gap, 1: 0.501 + gap, 2: 0.5 + gap}), "b": Given(dict.fromkeys(range(3), 0.5))}
        assert judge(claim, results).word == word


def test_a_row_can_be_held_against_a_number():
    results = {"a": Given({0: 0.75, 1: 0.76, 2: 0.77})}
    assert judge(ClaimSpec(says="", exceeds="a", than=0.7), results).word == "holds"
    assert judge(ClaimSpec(says="", exceeds="a", than=0.8), results).word == "does not hold"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=7))
def test_order_is_compared_pair_by_pair(rows):
    same = sum((a < c and b < d) or (a > c and b > d) for i, (a, b) in enumerate(rows) for c, d in rows[i + 1 :])
    of = sum(b != d for i, (_, b) in enumerate(rows) for _, d in rows[i + 1 :])
    assert agreement(rows) == (same, of)


def test_a_legend_names_rows_that_lack_the_setting_too():
    results = [SimpleNamespace(settings=settings) for settings in ({"mask.rule": "random"}, {})]
    assert [series_of("mask.rule", result) for result in results] == ["random", "no mask"]


@pytest.mark.parametrize("curve", [True, False])
def test_a_reported_best_on_test_stands_beside_the_best_on_test(curve):
    """And beside the last value where no best was measured: a report's number never vanishes."""

    class Measured(Given):
        begun = True

        def by_seed(self, name):
            return {0: {"test_accuracy": 0.5, "best_test_accuracy": 0.6}[name]} if curve or name[0] == "t" else {}

    result = Measured({})
    result.row = replace(ROW, reported=("drift/1/head",))
    table = make_table(["test_accuracy", "best_test_accuracy"], [result], "")
    last, best = table.lines[0].cells
    beside, other = (best, last) if curve else (last, best)
    assert (beside.reported.value, other.reported) == (0.6967, None) and table.is_compared(beside.measure)
    assert beside.difference == pytest.approx((0.6 if curve else 0.5) - 0.6967)
