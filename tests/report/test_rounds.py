import json
import re

import numpy as np
import pytest
from matplotlib.figure import Figure
from tests.report.conftest import drawn_mask
from tests.report.test_page import Outside

from fedsieve.report import figures, rounds
from fedsieve.report.folder import ClientTable, read_masks, read_run
from fedsieve.report.page import write_report
from fedsieve.report.rounds import describe_federation, holdings, levels, mask_changes


def view_of(folder):
    run, damage = read_run(folder), []
    view = describe_federation(run, read_masks(run, damage))
    assert not run.problems and not damage
    return view


def section(text, heading):
    """What stands under a heading, without markup."""
    start = text.index(f"<h2>{heading}")
    end = text.find("<h2>", start + 1)
    return " ".join(re.sub(r"<svg.*?</svg>|<[^>]*>", " ", text[start:end], flags=re.DOTALL).split())


def test_the_page_of_a_federated_run_has_every_section_and_speaks_of_rounds(make_federated):
    folder = make_federated()
    text = write_report(folder).read_text(encoding="utf-8")
    outside = Outside()
    outside.feed(text)
    assert outside.addresses == [] and "Damaged" not in text
    headings = [heading for heading in re.findall(r"<h2>([^<]*)", text) if heading not in ("Again", "Record")]
    assert headings == [
        "Stages", "Training", "Convergence", "Clients", "Accuracy by client", "Drift", "Bytes sent", "Refusals",
        "Mask of backbone", "Confusions", "Accuracy by class", "Predictions",
    ]  # fmt: skip
    shown = text[text.index("<main>") : text.index("<h2>Record")]
    assert "epoch" not in re.sub(r"<[^>]*>", "", shown)
    assert "chosen round" in section(text, "Stages") and "4 of 4" in section(text, "Stages")
    written = {path.stem for path in (folder / "figures").iterdir()}
    assert written >= {"clients", "client-accuracy", "client-sizes", "drift", "drift-blocks", "bytes", "bytes-total"}


def test_the_class_by_client_sentence_is_of_all_clients(make_federated):
    text = section(write_report(make_federated()).read_text(), "Clients")
    assert "8 clients, 2 of them strangers" in text
    assert "Images per client: 6 to 13, median 9.5. Classes per client, of 5: 2 each." in text


def test_refusals_are_told_beside_those_who_were_asked_to_train(make_federated):
    text = section(write_report(make_federated()).read_text(), "Refusals")
    # 4 rounds of 3; the ridge head's 6 clients could not fail.
    assert text.endswith("crash the client got the model and never answered 1 8.3 %")


def test_a_killed_run_has_a_page_of_what_it_did(make_federated, monkeypatch):
    folder = make_federated(finished=False)
    drawn = []
    monkeypatch.setattr(rounds, "bytes_by_round", lambda rows: drawn.extend(rows) or "<svg ></svg>")
    with (folder / "ledger.csv").open("a") as file:
        file.write("backbone,2,0,down,model,500,ok\nbackbone,2,1,dow")
    text = write_report(folder).read_text()
    assert "3 of 5 rounds done" in text and "Damaged" not in text and "Traceback" not in text
    assert "<h2>Clients" not in text and "<h2>Drift" in text and "<h2>Bytes sent" in text
    assert [(row["stage"], row["round"]) for row in drawn] == [("head", 1), ("backbone", 1), ("backbone", 2)]


def test_a_run_killed_before_its_first_round_has_a_page(make_federated):
    folder = make_federated(finished=False)
    for name in ("metrics.jsonl", "ledger.csv", "masks/backbone.safetensors"):
        (folder / name).unlink()
    assert "no round done yet" in write_report(folder).read_text()


def test_missing_and_damaged_files_leave_a_page(make_federated):
    folder = make_federated()
    (folder / "clients.npz").unlink()
    (folder / "ledger.csv").unlink()
    text = write_report(folder).read_text()
    assert "<h2>Clients" not in text and "ledger.csv is missing" in text
    folder = make_federated("other")
    (folder / "clients.npz").write_bytes(b"?")
    (folder / "ledger.csv").write_text("stage\nbackbone,one\n")
    text = write_report(folder).read_text()
    assert "clients.npz is damaged" in text and "ledger.csv is damaged" in text


@pytest.mark.parametrize(
    "change",
    [
        {"accuracy": np.ones(3)},
        {"client": np.full(16, 8)},
        {"label": np.full(16, -1)},
        {"strangers": np.array([9])},
        {"examples": np.ones(3)},
        {"sizes": np.array(["a"] * 8)},
    ],
)
def test_numbers_of_clients_that_do_not_fit_are_a_problem(make_federated, change):
    folder = make_federated()
    np.savez(folder / "clients.npz", **(dict(np.load(folder / "clients.npz")) | change))
    run = read_run(folder)
    assert run.clients is None and run.problems[0].startswith("clients.npz is damaged")


# --- convergence -----------------------------------------------------------------------------------------------------


def test_levels_are_round_from_the_first_and_shares_of_the_best():
    found = levels(np.array([0.45, 0.3, 0.8]))
    assert [level for level, share in found if share is None] == [0.4, 0.5, 0.6, 0.7, 0.8]
    assert [level for level, share in found if share] == pytest.approx([0.72, 0.76, 0.792, 0.8])
    assert found == sorted(found, key=lambda row: row[0])
    assert levels(np.array([0.05])) == [(share * 0.05, share) for share in (0.9, 0.95, 0.99, 1.0)]
    assert levels(np.array([0.0])) == []


def test_the_numbers_below_a_curve_are_those_of_each_stage_as_everywhere_else():
    stages = [("head", number) for number in range(1, 21)] + [("backbone", number) for number in range(1, 51)]
    rows = [{"index": i, "stage": stage, "round": number} for i, (stage, number) in enumerate(stages, start=1)]
    axes = Figure().add_subplot()
    figures.number_below(axes, rows)
    marks = {int(at): label.get_text() for at, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    assert marks == {10: "10", 20: "20", 30: "10", 40: "20", 50: "30", 60: "40", 70: "50"}
    assert axes.get_xlabel() == "round"
    figures.number_below(axes, [{"index": 1, "stage": "a", "epoch": 1}])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1"]


@pytest.mark.parametrize(("low", "high"), [(1.2, 4.5), (3.1, 3.9), (1, 9), (60, 1700), (1, 1e6)])
@pytest.mark.parametrize("way", ["x", "y"])
def test_a_log_scale_has_two_numbers_at_least_however_narrow(low, high, way):
    axes = Figure().add_subplot()
    axes.plot([low, high], [low, high])
    figures.log_scale(axes, way=way)
    ends, marks = (axes.get_xlim(), axes.get_xticks()) if way == "x" else (axes.get_ylim(), axes.get_yticks())
    assert 2 <= sum(ends[0] <= mark <= ends[1] for mark in marks) <= 8


def test_an_accuracy_is_reached_in_the_first_evaluated_round_that_has_it_with_all_sent_before(make_federated):
    folder = make_federated(rounds=6)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for place, accuracy in enumerate([0.35, None, 0.52, None, 0.48, None, 0.55]):
        rows[place]["val_accuracy"] = accuracy
        if accuracy is None:
            del rows[place]["val_accuracy"]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    view = view_of(folder)
    half = next(row for row in view.reached if row.accuracy == 0.5)
    head, backbone = view.traffic
    assert (half.round, half.stage, half.seconds) == (2, "backbone", 0.5 + 2 + 2)
    assert half.bytes == head.total + backbone.up[:2].sum() + backbone.down[:2].sum()
    assert view.reached[-1].share == 1.0 and view.reached[-1].round == 6
    summary = json.loads((folder / "summary.json").read_text())
    summary["stages"]["backbone"]["best_at"] = rows[6]["round"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert read_run(folder).chosen("backbone") == view.reached[-1].round  # one count, from 1 in every stage
    count, mean, deviation = view.steady  # of the last stage only
    assert count == 3 and mean == pytest.approx(np.mean([0.52, 0.48, 0.55]))
    assert deviation == pytest.approx(np.std([0.52, 0.48, 0.55]))


def test_a_table_of_test_accuracy_says_that_nothing_was_selected_on_it(make_federated):
    text = section(write_report(make_federated("a", val=False, test_curve=True)).read_text(), "Convergence")
    assert "the curve is test accuracy, and nothing was selected on it" in text
    text = section(write_report(make_federated("b", test_curve=True)).read_text(), "Convergence")
    assert "When validation accuracies" in text and "selected" not in text


def test_a_test_curve_says_how_often_it_was_watched(make_federated):
    text = write_report(make_federated(test_curve=True, federation={"evaluate_every": 3})).read_text()
    assert "test, watched every 3 rounds, never used to select" in text


def test_a_line_passes_over_rounds_that_were_not_evaluated():
    rows = [{"index": i, "stage": "s", "round": i} | ({"val_loss": 1.0 * i} if i % 3 == 0 else {}) for i in range(1, 8)]
    axes = Figure().add_subplot()
    figures.by_stage(axes, [{"index": 0, "stage": "head", "round": 1}, *rows], "val_loss", 1.0, label="here")
    (line,) = axes.lines
    assert line.get_xdata().tolist() == [3, 6] and line.get_ydata().tolist() == [3, 6] and line.get_label() == "here"


# --- clients ---------------------------------------------------------------------------------------------------------


def clients_of(count, classes, seed=0):
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 4, (count, classes))
    client, label = np.nonzero(table)
    return table, ClientTable(rng.random(count), table.sum(1), np.array([0]), client, label, table[client, label])


def test_the_picture_of_classes_and_clients_is_their_table():
    table, clients = clients_of(12, 30)
    shown = holdings(clients, 30)
    assert shown.shown.tolist() == list(range(12)) and (shown.images == table).all() and shown.together == 1


def test_many_clients_are_sampled_and_many_classes_share_columns(monkeypatch):
    monkeypatch.setattr(rounds, "SHOWN_CLIENTS", 50)
    table, clients = clients_of(301, 120)
    shown = holdings(clients, 120)
    assert len(shown.shown) == 50 and {0, 300} <= set(shown.shown.tolist()) and shown.together == 3
    joined = np.array([table[client].reshape(40, 3).sum(1) for client in shown.shown])
    assert (shown.images == joined).all()
    assert (np.diff(shown.images.argmax(1)) >= 0).all(), "in the order of their largest class"


def test_a_page_of_many_clients_says_what_it_leaves_out(make_federated):
    folder = make_federated()
    _, clients = clients_of(450, 210)
    arrays = {name: getattr(clients, name) for name in ("sizes", "strangers", "client", "label", "examples")}
    np.savez(folder / "clients.npz", accuracy=np.where(np.arange(450) == 7, np.nan, 0.5), **arrays)
    text = write_report(folder).read_text()
    assert "Shown are 200 of 450 clients" in text and "A column is 2 neighbouring classes" in text
    assert "1 client holds no class that the test set has" in text


def test_personal_models_stand_beside_the_global_one(make_federated):
    folder = make_federated()
    summary = json.loads((folder / "summary.json").read_text())
    spread = {"clients": 6, "mean": 0.875, "std": 0.02, "worst_decile": 0.8, "worst": 0.75}
    (folder / "summary.json").write_text(json.dumps(summary | {"personal": {"local": spread}}))
    text = section(write_report(folder).read_text(), "Personal models")
    assert "global 6 50.00 % 10.00 % 31.25 % 25.00 % 45.00 %" in text
    assert "local 6 87.50 % 2.00 % 80.00 % 75.00 % –" in text


# --- masks -----------------------------------------------------------------------------------------------------------


def test_a_new_mask_is_no_damage_and_its_change_is_counted(make_federated):
    masks = {1: drawn_mask(0), 3: drawn_mask(1), 4: drawn_mask(2)}
    folder = make_federated(masks=masks, mask={"sparsity": 0.9, "refresh": 1})
    text = write_report(folder).read_text()
    assert "Damaged" not in text and masks[4].id[:12] in text
    summary = json.loads((folder / "summary.json").read_text())
    summary["stages"]["backbone"] |= {"best_at": 3, "mask_id": masks[3].id}
    (folder / "summary.json").write_text(json.dumps(summary))
    earlier = write_report(folder).read_text()
    assert "Damaged" not in earlier and masks[3].id[:12] in earlier and "this is the chosen round's" in earlier
    (folder / "masks" / "backbone.round-3.safetensors").unlink()
    assert "is not the mask of the run" in write_report(folder).read_text()
    assert "The mask was calibrated again 2 times." in section(text, "New masks")
    (first, second) = mask_changes(masks)
    sets = {number: set(mask.indices().tolist()) for number, mask in masks.items()}
    assert (first.round, second.round) == (3, 4)
    assert (second.entered, second.left) == (len(sets[4] - sets[3]), len(sets[3] - sets[4]))
    assert second.jaccard == pytest.approx(len(sets[4] & sets[3]) / len(sets[4] | sets[3]))
    assert second.first == pytest.approx(len(sets[4] & sets[1]) / len(sets[4] | sets[1]))


def own_masks(make_federated, seeds, rule="least_sensitive"):
    folder = make_federated(masks={}, mask={"sparsity": 0.9, "scope": "client", "rule": rule})
    for client, seed in enumerate(seeds):
        drawn_mask(seed).save(folder / "masks" / f"backbone.client-{client}.safetensors")
    return folder


def test_the_overlap_of_clients_masks_is_beside_chance(make_federated):
    folder = own_masks(make_federated, [0, 1, 2])
    (overlap,) = view_of(folder).overlaps
    sets = [set(drawn_mask(seed).indices().tolist()) for seed in range(3)]
    pairs = [len(a & b) / len(a | b) for a, b in ((sets[0], sets[1]), (sets[0], sets[2]), (sets[1], sets[2]))]
    assert overlap["jaccard"] == pytest.approx(np.mean(pairs)) and overlap["pairs"] == 3
    p = overlap["density"]
    assert overlap["chance"] == pytest.approx(p / (2 - p), rel=0.05)
    text = write_report(folder).read_text()
    assert "Masks of the clients" in text and "equal" not in section(text, "Masks of the clients")
    assert "<h2>Mask of" not in text


def test_masks_by_magnitude_are_said_to_be_equal_by_construction(make_federated):
    text = section(write_report(own_masks(make_federated, [4, 4], "low_magnitude")).read_text(), "Masks of the clients")
    assert "They are all equal, bit for bit." in text and "equal by construction" in text


def test_more_masks_than_can_be_compared_are_sampled_and_all_counted(make_federated):
    folder = own_masks(make_federated, range(45))
    run = read_run(folder)
    masks = read_masks(run, [])["backbone"]
    assert len(masks.clients) == 40 and len(masks.sizes) == 45 and {0, 44} <= set(masks.clients)
    assert "Compared are 40 of 45 masks" in section(write_report(folder).read_text(), "Masks of the clients")


def test_a_stage_whose_name_looks_like_a_clients_mask_keeps_its_own(make_federated):
    folder = make_federated()
    drawn_mask(1).save(folder / "masks" / "other.client-3.safetensors")
    masks = read_masks(read_run(folder), [])
    assert set(masks) == {"backbone", "other.client-3"} and not masks["backbone"].clients
