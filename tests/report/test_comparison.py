import re

import pytest

from fedsieve.errors import FedsieveError
from fedsieve.report.comparison import write_comparison
from fedsieve.report.folder import read_run
from fedsieve.report.html import percent, size
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

    results = text[text.index("<h2>Results") : text.index("<h2>What differs")]
    assert results.index("better") < results.index("fixture")  # best first
    assert "73.00" in results and "± 3.61" in results  # mean and sample deviation of 70, 72, 77
    assert results.count("±") == 2 + 1  # the sentence, and accuracies of the one group with several seeds
    assert re.search(r'title="0, 1, 2">3<', results)

    left_out = text[text.index('class="notice"') : text.index("<h2>Results")]
    assert "unfinished: no summary.json yet" in left_out
    assert "summary.json is damaged" in left_out
    assert "left out: same config and seed as" in left_out
    assert "not a run folder" in left_out

    differs = text[text.index("<h2>What differs") : text.index("<h2>Validation")]
    keys = re.findall(r'class="key">([a-z_.]+)<', differs)
    assert keys == ["data.val_fraction", "stages.head.optimizer.lr"]
    assert "Without validation data: better" in text


def test_runs_without_any_result_still_make_a_page(make_run, tmp_path):
    text = write_comparison([make_run("run", finished=False)], tmp_path / "page.html").read_text()
    assert "unfinished" in text and "<h2>Results" not in text


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
    assert "One line for every run, by epoch or round." in text
    assert text.count('role="img"') == 3, "accuracy also by bytes"


def test_central_runs_say_nothing_of_a_federation(make_run, tmp_path):
    text = write_comparison([make_run("run")], tmp_path).read_text()
    assert "<h2>Federation" not in text and "by epoch." in text and text.count('role="img"') == 2
