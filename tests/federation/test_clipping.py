"""Secure sums clip what lies beyond privacy.bound: each client counts its own values, and its user hears of it."""

import json
import warnings

import numpy as np
from tests.federation.network import Network

from fedsieve.config import Privacy
from fedsieve.federation.secure import Inputs, update_point
from fedsieve.runner.run import run
from fedsieve.wire.envelope import unwrap

TIGHT = ("privacy={aggregation: secagg, bound: 1e-3}", "federation.cohort=5", "stages.all.rounds=2")


def clippings(caught) -> list[str]:
    return [str(warning.message) for warning in caught if "privacy.bound" in str(warning.message)]


def test_values_beyond_the_bound_are_counted():
    inputs = Inputs(Privacy(aggregation="secagg", bound=0.1), 0, "stage")
    for row in ([0.05, -0.2, 0.1, -0.1], [0.3, 0.0, 7.0, -9.0]):
        row = np.array(row, np.float32)
        inputs.update(0, 0, row, 1, update_point(inputs.privacy, 5, 1))
    assert (inputs.clipped, inputs.seen) == (4, 8)


def test_a_stage_that_clips_warns_once_with_the_share_and_what_to_do(federated, running):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running(federated(*TIGHT))
    (said,) = clippings(caught)
    assert 'stage "all"' in said and "%" in said and "Raise privacy.bound" in said and "(0.001)" in said


def test_a_stage_that_does_not_clip_is_silent(federated, running):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running(federated(*TIGHT, "privacy.bound=10"))
    assert not clippings(caught)


def test_sites_count_for_themselves_and_the_server_does_not_hear_of_it(federated, tmp_path, monkeypatch):
    monkeypatch.setattr("fedsieve.runner.run._write_page", lambda folder: None)
    heads = []

    def listen(node, number, reply):
        heads.append(unwrap(reply)[0])
        return reply

    experiment = federated(*TIGHT, "executor=sequential")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(experiment, tmp_path / "run", transport=Network(tmp_path / "sites", 8, listen))
    files = list((tmp_path / "sites").glob("*/*/sent.jsonl"))
    notes = {file: [json.loads(line) for line in file.open()] for file in files}
    counts = {
        file: [note["clipped"] for note in those if note["what"] == "update.pad"] for file, those in notes.items()
    }
    clipping = [file for file, found in counts.items() if any(found)]
    assert sum(map(len, counts.values())) == 2 * 5 and len(clipping) >= 5
    said = clippings(caught)
    assert len(said) == len(clipping) and all(text.startswith("site ") for text in said)  # once each, in two rounds
    assert "clipped" not in json.dumps(heads)
    texts = [file for file in (tmp_path / "run").rglob("*") if file.suffix in (".jsonl", ".json", ".csv", ".yaml")]
    assert texts and not any("clipped" in file.read_text() for file in texts)
