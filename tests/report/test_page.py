import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from fedsieve.errors import FedsieveError
from fedsieve.report.folder import read_run
from fedsieve.report.intervals import Z
from fedsieve.report.page import _interval, write_report


class Outside(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("src", "href", "xlink:href") and not value.startswith(("data:", "#")):
                self.addresses.append((tag, value))
        assert tag not in ("script", "link", "iframe")


def test_the_page_of_a_finished_run_stands_alone_and_says_what_came_out(make_run):
    folder = make_run("run")
    page = write_report(folder)
    assert page == folder / "report.html"
    text = page.read_text(encoding="utf-8")
    outside = Outside()
    outside.feed(text)
    assert outside.addresses == []
    assert "@import" not in text and "url(http" not in text
    assert "75.00<small>%</small>" in text
    assert "fedsieve resume run" in text and "fedsieve evaluate run" in text and "fedsieve run run/config.yaml" in text
    assert "git.commit" in text and "val_fraction: 0.1" in text
    assert text.count('class="tile right"') == 2 and text.count('class="tile wrong"') == 1
    written = {path.name for path in (folder / "figures").iterdir()}
    assert written >= {
        "accuracy.svg",
        "loss.svg",
        "learning-rate.svg",
        "confusion.svg",
        "classes.svg",
        "predictions.png",
    }
    # Names of classes and commands are text, never markup.
    assert "<b>cat</b>" not in text and "a<b.yaml" not in text
    assert "&lt;b&gt;cat&lt;/b&gt;" in text and "dog &amp; &#34;co&#34;" in text


def test_the_same_run_gives_the_same_page(make_run):
    folder = make_run("run", finished=False)
    first = write_report(folder).read_text()
    assert write_report(folder).read_text() == first


def test_an_unfinished_run_has_a_page_that_says_so(make_run):
    folder = make_run("run", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"index": 4, "stage": "backb')
    text = write_report(folder).read_text()
    assert "Unfinished" in text and "3 of 4 epochs done" in text
    assert "Damaged" not in text


def test_a_run_killed_before_its_first_epoch_has_a_page(make_run):
    folder = make_run("run", finished=False)
    (folder / "metrics.jsonl").unlink()
    (folder / "environment.json").unlink()
    assert "no epoch done yet" in write_report(folder).read_text()


def test_damage_is_told_on_the_page(make_run):
    folder = make_run("run")
    (folder / "summary.json").write_text("{")
    (folder / "predictions.npz").write_bytes(b"?")
    (folder / "environment.json").write_text("{")
    text = write_report(folder).read_text()
    assert "No result" in text and "Unfinished" not in text
    for name in ("summary.json", "predictions.npz", "environment.json"):
        assert f"{name} is damaged" in text


def test_a_page_tells_what_a_finished_run_lost(make_federated):
    folder = make_federated()
    lines = (folder / "ledger.csv").read_text().splitlines(keepends=True)
    (folder / "ledger.csv").write_text("".join(line for line in lines if ",down," not in line))
    assert "ledger.csv is damaged: 0 of the" in write_report(folder).read_text()


def test_test_curves_are_labelled_and_fields_of_other_versions_do_no_harm(make_run):
    folder = make_run("run", val=False)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"test_accuracy": 0.5, "test_loss": float("nan"), "round": row.pop("epoch"), "drift": 0.1, "lr": None}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = write_report(folder).read_text()
    assert "test, watched every round, never used to select" in text
    assert "nothing was held out, and nothing was selected" in text
    assert not (folder / "figures" / "learning-rate.svg").exists()


def test_a_hundred_classes_show_the_best_and_the_worst(make_run):
    folder = make_run("run")
    labels = np.arange(400) % 100
    np.savez(
        folder / "predictions.npz",
        labels=labels,
        predicted=np.where(np.arange(400) < 30, 0, labels),
        confidence=np.ones(400),
        class_names=np.array([f"class {i}" for i in range(100)]),
        sample_rows=np.arange(0),
        sample_images=np.zeros((0, 3, 8, 8), np.uint8),
    )
    text = write_report(folder).read_text()
    assert {"classes-best.svg", "classes-worst.svg"} <= {path.name for path in (folder / "figures").iterdir()}
    rows = re.findall(
        r"<tr><td>(class \d+)</td><td>(class \d+)</td><td class=\"n\">(\d+)</td><td class=\"n\">25.0", text
    )
    assert len(rows) == 12 and all(predicted == "class 0" and count == "1" for _, predicted, count in rows)


def test_the_interval_is_wilsons(make_run):
    run = read_run(make_run("run"))
    low, high = _interval(run)
    # Its ends p solve |p - 0.75| = z sqrt(p (1 - p) / n).
    for end in (low, high):
        assert abs(end - 0.75) == pytest.approx(Z * (end * (1 - end) / 20) ** 0.5)


def test_a_page_that_cannot_be_written_is_an_error_with_its_path(make_run):
    folder = make_run("run", finished=False)
    (folder / "report.html").mkdir()
    with pytest.raises(FedsieveError, match=r"report\.html: cannot be written"):
        write_report(folder)
