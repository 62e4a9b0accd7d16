import json
import re
import shutil

import numpy as np
import pytest
import yaml

from fedsieve.errors import FedsieveError
from fedsieve.report import figures
from fedsieve.report.comparison import compare, difference, settings_that_differ, write_comparison
from fedsieve.report.folder import read_run
from fedsieve.report.html import percent, size
from fedsieve.report.intervals import matched, paired, unpaired
from fedsieve.report.traffic import of_dense, read_traffic


def test_seeds_are_grouped_and_what_has_no_result_is_named(make_run, tmp_path):
    seeds = [make_run(f"seed{seed}", seed=seed, accuracy=accuracy) for seed, accuracy in enumerate([0.70, 0.72, 0.77])]
    better = make_run("better", accuracy=0.9, experiment="better", lr=0.01, val=False)
    unfinished = make_run("unfinished", seed=3, finished=False)
    damaged = make_run("damaged", seed=4)
    (damaged / "summary.json").write_text("{")
    again = make_run("again", seed=0, accuracy=0.1)
    page = write_comparison([*seeds, better, unfinished, damaged, again, tmp_path / "gone"], tmp_path / "out")
    assert page == tmp_path / "out" / "comparison.html"
    text = page.read_text(encoding="utf-8")

    results = text[text.index("<h2>Results") : text.index("<h2>Differences")]
    assert results.index("better") < results.index("fixture")  # best first
    assert "73.00" in results and "± 3.61" in results  # mean and sample deviation of 70, 72, 77
    assert results.count("±") == 2 + 1  # the sentence, and accuracies of the one group with several seeds
    assert re.search(r'title="0, 1, 2">3<', results)

    left_out = text[text.index('class="notice"') : text.index("<h2>Results")]
    assert "unfinished: no summary.json yet" in left_out
    assert "summary.json is damaged" in left_out
    assert "left out: same config and seed as" in left_out
    assert "not a run folder" in left_out

    differs = text[text.index("<h2>What differs") : text.index("<h2>Every run")]
    keys = re.findall(r'class="key">([a-z_.]+)<', differs)
    assert keys == ["data.val_fraction", "stages.head.optimizer.lr"]
    assert "Without validation data: better" in text


def test_runs_without_any_result_still_make_a_page(make_run, tmp_path):
    text = write_comparison([make_run("run", finished=False)], tmp_path / "page.html").read_text()
    assert "unfinished" in text and "<h2>Results" not in text


def without_lines(folder, name, part):
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text("".join(line for line in lines if part not in line))


DAMAGE = {
    "ledger.csv is damaged: 0 of the": lambda folder: without_lines(folder, "ledger.csv", ",down,"),
    "ledger.csv is damaged: 11,880 of the 12,468 bytes sent up": lambda folder: without_lines(
        folder, "ledger.csv", ",3,0,up,"
    ),
    "ledger.csv is damaged: line 2 is no message": lambda folder: (folder / "ledger.csv").write_text("a\nb\n"),
    "ledger.csv is missing": lambda folder: (folder / "ledger.csv").unlink(),
    "metrics.jsonl is missing: 0 of the 1 rounds of stage head": lambda folder: (folder / "metrics.jsonl").unlink(),
    "metrics.jsonl is damaged: 3 of the 4 rounds of": lambda folder: without_lines(
        folder, "metrics.jsonl", '"round": 3'
    ),
    "metrics.jsonl, line 1 is damaged": lambda folder: (folder / "metrics.jsonl").write_text(
        "?\n" + (folder / "metrics.jsonl").read_text()
    ),
    "predictions.npz is damaged: not an npz file": lambda folder: (folder / "predictions.npz").write_bytes(b"?"),
    "predictions.npz is missing": lambda folder: (folder / "predictions.npz").unlink(),
    "clients.npz is damaged": lambda folder: (folder / "clients.npz").write_bytes(b"?"),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_finished_run_that_lost_something_is_named_and_left_out(make_federated, reason):
    whole, damaged = make_federated("whole"), make_federated("damaged", mask={"sparsity": 0.8})
    DAMAGE[reason](damaged)
    found = compare([whole, damaged])
    assert [run.path for group in found.groups for run in group.runs] == [whole]
    ((folder, told),) = found.missing
    assert folder == str(damaged) and told.startswith(reason)


def test_a_run_that_lost_its_config_is_named_among_others(make_federated):
    whole, damaged = make_federated("whole"), make_federated("damaged", mask={"sparsity": 0.8})
    (damaged / "config.yaml").unlink()
    found = compare([whole.parent])
    ((folder, told),) = found.missing
    assert folder == str(damaged) and "config.yaml" in told
    assert [run.path for group in found.groups for run in group.runs] == [whole]


def test_bytes_that_moved_to_another_stage_are_a_damaged_ledger(make_federated):
    folder = make_federated()
    summary = json.loads((folder / "summary.json").read_text())
    summary["stages"]["head"] |= {"bytes_up": 6000, "bytes_down": 0}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert read_run(folder).torn is None
    ledger = folder / "ledger.csv"
    ledger.write_text(ledger.read_text().replace("head,1,0", "backbone,1,0"))
    assert read_run(folder).torn == "ledger.csv is damaged: 5,000 of the 6,000 bytes sent up in stage head"


def test_sites_that_test_on_their_own_images_leave_no_predictions(make_federated):
    folder = make_federated()
    (folder / "predictions.npz").unlink()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["data"] |= {"source": "none", "class_names": ["a", "b"]}
    config["federation"] |= {"partition": {"kind": "sites"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert compare([folder]).missing == []


def test_nothing_to_compare_is_an_error(tmp_path):
    with pytest.raises(FedsieveError, match="no run folders"):
        write_comparison([], tmp_path)


def test_federated_runs_show_rounds_bytes_and_clients(make_run, make_federated, tmp_path):
    central, federated = make_run("central"), make_federated("federated", message={"up": "int8", "down": "fp16"})
    text = write_comparison([central, federated], tmp_path).read_text(encoding="utf-8")
    table = text[text.index("<h2>Federation") : text.index("<h2>What differs")]
    rows = re.findall(r"<tr>\s*<th scope.*?</tr>", table, flags=re.DOTALL)
    cells = [
        re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<t[hd].*?</t[hd]>", rows[0], flags=re.DOTALL)
    ]
    summary = read_run(federated).summary
    assert len(rows) == 1 and cells[:2] == ["federated", "5"]
    assert cells[2:5] == [
        size(sent) for sent in (summary.bytes_up, summary.bytes_down, summary.bytes_up + summary.bytes_down)
    ]
    assert cells[5] == percent(of_dense(read_traffic(read_run(federated))))
    assert cells[6:] == ["50.00", "", "31.25", ""]
    assert "One line for every run." in text and "epoch or round" in text
    assert text.count('role="img"') == 5, "accuracy also by bytes and by seconds, and the difference"


def test_central_runs_say_nothing_of_a_federation(make_run, tmp_path):
    text = write_comparison([make_run("run")], tmp_path).read_text()
    assert "<h2>Federation" not in text and "<h2>Differences" not in text and text.count('role="img"') == 3


def test_the_figure_by_seconds_shows_runs_of_any_length(make_run, tmp_path, monkeypatch):
    draw, limits = figures.overlay.__wrapped__, {}

    def overlay(lines, label, below, *rest):
        figure = draw(lines, label, below, *rest)
        limits[below] = figure.axes[0].get_xlim()
        return "<svg ></svg>"

    monkeypatch.setattr(figures, "overlay", overlay)
    run = make_run("run")
    for seconds in (0.01, 1.5):
        rows = [json.loads(line) | {"seconds": seconds} for line in (run / "metrics.jsonl").read_text().splitlines()]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        write_comparison([run], tmp_path)
        left, right = limits["seconds so far"]
        assert left == 0 and 4 * seconds < right < 5 * seconds
    assert limits["epochs so far"][0] == 0.5


def test_without_validation_test_curves_are_shown_where_every_run_has_one(make_run, make_federated, tmp_path):
    watched, other = make_federated("watched", val=False, test_curve=True), make_run("other", val=False)
    text = write_comparison([watched], tmp_path).read_text()
    assert "<h2>Test</h2>" in text and "never used to select" in text and "No curves" not in text
    labels = re.findall(r'aria-label="([^"]*)"', text)
    assert labels == [f"test {name}" for name in (
        "accuracy by round", "loss by round", "accuracy by bytes", "accuracy by seconds",
    )]  # fmt: skip
    text = write_comparison([watched, other], tmp_path).read_text()
    assert "No curves: no run held out validation data" in text and "<h2>Test</h2>" not in text
    assert 'aria-label="test' not in text
    text = write_comparison([watched, make_run("held", lr=1.0)], tmp_path).read_text()
    assert "Without validation data: federated" in text and 'aria-label="test' not in text


def groups_of(make_run, *parts, **options):
    """One group for each mapping of seeds to accuracies, best first."""
    folders = [
        make_run(f"{number}-{seed}", seed=seed, accuracy=accuracy, experiment=f"e{number}", lr=0.1 + number, **options)
        for number, part in enumerate(parts)
        for seed, accuracy in part.items()
    ]
    return compare(folders)


def test_seeds_are_compared_in_pairs_where_two_or_more_are_shared(make_run):
    found = groups_of(make_run, {0: 0.8, 1: 0.9, 2: 0.7, 5: 0.75}, {2: 0.6, 1: 0.85, 0: 0.72, 7: 0.1})
    (row,) = found.behind
    assert row.interval == paired([0.72, 0.85, 0.6], [0.8, 0.9, 0.7]) and row.over == "3 seeds, in pairs"
    assert row.value == pytest.approx(np.mean([0.72, 0.85, 0.6]) - 0.8), "of the shared seeds alone"
    assert row.clear == (row.interval[1] < 0)


def test_seeds_that_are_not_shared_are_compared_apart(make_run):
    found = groups_of(make_run, {0: 0.8, 1: 0.9}, {1: 0.6, 3: 0.5, 4: 0.55})
    (row,) = found.behind
    assert row.interval == unpaired([0.6, 0.5, 0.55], [0.8, 0.9]) and row.over == "3 and 2 seeds, apart"
    assert row.value == pytest.approx(0.55 - 0.85)


def test_one_seed_is_compared_over_test_images_if_they_are_the_same(make_run, tmp_path):
    better, worse = make_run("better", accuracy=0.8, experiment="a"), make_run("worse", accuracy=0.7, lr=1.0)
    labels = np.arange(20) % 3

    def answer(folder, wrong, labels=labels):
        with np.load(folder / "predictions.npz") as file:
            content = dict(file)
        predicted = np.where(np.isin(np.arange(20), wrong), (labels + 1) % 3, labels)
        np.savez(folder / "predictions.npz", **(content | {"labels": labels, "predicted": predicted}))

    answer(better, [0, 1, 2, 3])
    answer(worse, [0, 1, 10, 11, 12, 13])
    (row,) = compare([better, worse]).behind
    assert row.interval == matched(2, 4, 20) and row.value == pytest.approx(-0.1)
    assert row.over == "20 test images, seed 0"
    page = write_comparison([better, worse], tmp_path / "page.html").read_text()
    assert "-10.00" in page and "not told apart" in page and 'aria-label="differences"' in page

    answer(worse, [0], labels=labels[::-1])
    (row,) = compare([better, worse]).behind
    assert row.interval is None and row.over == "one seed: no interval"
    page = write_comparison([better, worse], tmp_path / "page.html").read_text()
    assert "One seed supports no interval" in page and 'aria-label="differences"' not in page


def test_every_difference_turns_round_with_its_sides(make_run):
    one, two = groups_of(make_run, {0: 0.8, 1: 0.9, 2: 0.7}, {0: 0.7, 1: 0.85, 2: 0.72}).groups
    there, back = difference(one, two, "test_accuracy"), difference(two, one, "test_accuracy")
    assert (there.value, *there.interval) == pytest.approx((-back.value, -back.interval[1], -back.interval[0]))


def test_runs_with_a_closed_test_set_are_compared_by_validation(make_run, tmp_path):
    folders = [make_run(f"{seed}-{lr}", seed=seed, lr=lr, experiment=f"e{lr}") for lr in (0.1, 0.2) for seed in (0, 1)]
    tested = make_run("tested", lr=0.3, experiment="tested")
    for number, folder in enumerate(folders):
        config = folder / "config.yaml"
        config.write_text(config.read_text().replace("test: true", "test: false"))
        summary = json.loads((folder / "summary.json").read_text())
        summary |= {"test_accuracy": None, "val_accuracy": 0.5 + 0.1 * number}
        (folder / "summary.json").write_text(json.dumps(summary))
    found = compare(folders)
    assert found.measure == "validation" and [group.label for group in found.groups] == ["e0.2", "e0.1"]
    assert found.behind[0].value == pytest.approx(-0.2)
    assert "By validation accuracy" in write_comparison(found, tmp_path / "page.html").read_text()
    mixed = compare([*folders, tested])
    assert mixed.measure == "test_accuracy" and mixed.groups[0].label == "tested" and mixed.behind == []


def test_a_folder_of_runs_stands_for_them(make_run, tmp_path):
    runs = tmp_path / "sweep" / "trials"
    runs.mkdir(parents=True)
    for number in range(2):
        shutil.move(make_run(f"r{number}", lr=0.1 + number, experiment=f"e{number}"), runs / f"{number}")
    assert [group.label for group in compare([tmp_path / "sweep"]).groups] == ["e0", "e1"]
    assert [group.label for group in compare([runs]).groups] == ["e0", "e1"]
    assert [group.label for group in compare([tmp_path]).groups] == ["e0", "e1"]


def test_devices_are_no_difference(make_run):
    one, two = make_run("one", seed=0), make_run("two", seed=1)
    (two / "config.yaml").write_text((two / "config.yaml").read_text().replace("device: auto", "device: cpu"))
    assert [group.size for group in compare([one, two]).groups] == [2]


def test_a_seed_that_stopped_early_shortens_the_mean_and_not_the_page(make_run, tmp_path):
    one, two = make_run("one", seed=0), make_run("two", seed=1)
    lines = (two / "metrics.jsonl").read_text().splitlines()
    (two / "metrics.jsonl").write_text("\n".join(lines[:3]))
    summary = json.loads((two / "summary.json").read_text())
    summary["stages"]["backbone"]["epochs"] = 1
    (two / "summary.json").write_text(json.dumps(summary))
    assert "each seed behind in a thin line" in write_comparison([one, two], tmp_path / "page.html").read_text()


def test_of_a_section_that_only_some_have_the_chosen_settings_are_shown(make_run, make_federated):
    shown = settings_that_differ(compare([make_run("central"), make_federated("federated")]).groups)
    assert {key for key in shown if key.startswith("federation")} == {
        "federation.clients", "federation.cohort", "federation.held_out",
    }  # fmt: skip
    assert shown["federation.cohort"] == ["–", "3"] or shown["federation.cohort"] == ["3", "–"]
    assert "stages.backbone.sparse" in shown and "stages.head.batch_size" not in shown
