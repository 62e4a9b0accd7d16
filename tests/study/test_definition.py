"""Studies as data: what their files say becomes rows that can run, whole and in miniature."""

import itertools

import pytest
import yaml

from fedsieve.config import make_experiment
from fedsieve.errors import FedsieveError
from fedsieve.federation.sums import check_numbers
from fedsieve.runner.experiment import run
from fedsieve.study.definition import FOLDER, STUDIES, applies, load_reported, load_study, miniature

OWN = """
title: own
text: a study of a test
words: {iid: {kind: iid}, nc2: {kind: classes, nc: 2}}
base:
  data: {source: digits, size: 8, normalize: half, val_fraction: 0.2}
  model: {backbone: vit_tiny_patch16_224, weights: none}
bases:
  central: {stages: [{name: all, train: all, epochs: 1}]}
  federated:
    federation: {clients: 4, partition: {kind: dirichlet, alpha: 1.0}}
    stages: [{name: all, train: all, rounds: 1}]
rows:
  - {name: central, base: central}
  - name: $where/j$j
    label: $where with $j
    each: {where: [iid, nc2], j: [1, 2]}
    base: federated
    set: {federation.partition: $where, stages.all.local.epochs: $j}
sections: [{title: all, rows: ["*"]}]
"""


@pytest.fixture
def own(tmp_path):
    """own(text, *overrides) -> Study, from a file of its own."""

    def load(text=OWN, *overrides, **others):
        (tmp_path / "own.yaml").write_text(text)
        return load_study("own", overrides, where=tmp_path, **others)

    return load


@pytest.mark.parametrize(("name", "smoke"), itertools.product(STUDIES, (False, True)))
def test_every_row_is_a_valid_experiment_and_so_is_what_chooses_its_settings(name, smoke):
    study = load_study(name, smoke=smoke)
    for row in study.rows.values():
        experiment = study.experiment(row, 1)
        assert experiment.seed == 1
        for values in itertools.product(*study.tune(row, experiment).values()):
            tried = dict(zip(study.tune(row, experiment), values, strict=True))
            search = study.search(row, tried)
            assert search.seed == 0 and search.data.val_fraction > 0 and not search.test


def test_a_search_is_as_short_as_the_study_says_and_no_longer_than_its_row():
    for rounds, length in (50, 15), (100, 15), (8, 8):
        study = load_study("drift", [f"stages.backbone.rounds={rounds}"])
        row = study.rows["fig6-rates/iid-random"]
        assert (study.experiment(row, 0).stages[1].length, study.search(row, {}).stages[1].length) == (rounds, length)


def test_what_a_search_leaves_out_no_override_brings_back():
    study = load_study("personalization", ["federation.personal.clients=20"])
    row = study.rows["full/nc5"]
    assert study.experiment(row, 0).federation.personal.clients == 20
    assert study.search(row, {}).federation.personal is None


def test_every_reported_figure_belongs_to_a_row_that_is_shown_with_it():
    known = {(entry.id, entry.metric) for entry in load_reported()}
    assert len(known) == len(load_reported())
    shown = set()
    for name in STUDIES:
        study = load_study(name)
        for section in study.spec.sections:
            rows = {row.name: row for pattern in section.rows for row in study.matching(pattern)}
            shown |= {(name, column) for row in rows.values() for name in row.reported for column in section.columns}
    assert {entry for entry in known - shown if not entry[1].endswith("_change")} == set()  # changes are put in words


@pytest.mark.parametrize("name", STUDIES)
def test_no_claim_compares_two_runs_that_are_the_same(name):
    """Its answer would be known before anything ran."""
    study = load_study(name)

    def trained(row):
        """The row's settings, without calibration rounds that end in the mask of one round."""
        experiment = study.experiment(study.rows[row], 0)
        sieve = experiment.mask
        if sieve and (not sieve.scored or (sieve.shrink == 1 and sieve.fisher.labels)):
            experiment = experiment.model_copy(update={"mask": sieve.model_copy(update={"calibration_rounds": 1})})
        return experiment.model_dump(exclude={"name"})

    for claim in (claim for section in study.spec.sections for claim in section.claims if not claim.exceeds):
        assert trained(claim.rows[0]) != trained(claim.rows[1]), claim.says


def test_calibration_rounds_that_cannot_differ_end_in_one_mask(tmp_path):
    """With the data's labels and without shrink, as the claims above take for granted."""
    study = load_study("editing", smoke=True)
    masks = set()
    for rounds in (1, 3):
        row = study.rows[f"central/edit-s0.9-c{rounds}"]
        masks.add(run(study.experiment(row, 0), tmp_path / row.name, page=False)["stages"]["edit"]["mask_id"])
    assert len(masks) == 1


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            "columns: [calibration_seconds]",
            r"no measure \"calibration_seconds\". It belongs to a stage: last.calibration",
        ),
        ("columns: [last.calibration_seconds]", "no row can have last.calibration_seconds"),  # nobody has a mask
        ("columns: [peak_memory]", 'no measure "peak_memory"'),
        ("columns: [clients.median]", 'no measure "clients.median"'),
        ("columns: [test_acuracy]", 'Did you mean "test_accuracy"'),
        ("columns: [test_accuracy, steadiness]", "no row can have steadiness"),  # of one evaluation
        ("columns: [best_test_accuracy]", "no row can have best_test_accuracy"),  # no test curve
        ("columns: [last.seconds]", "no row can have last.seconds"),  # of a single round, which also compiles
        ("columns: [jaccard]", "no row can have jaccard"),
        ("columns: [epsilon]", "no row can have epsilon"),
        ("columns: [gain]", "no row can have gain"),
        ("columns: [personal.local.mean]", "no row can have personal.local.mean"),
        ("figures: [{kind: dots, title: Agreement, y: jaccard}]", 'figure "Agreement": no row can have jaccard'),
        ("figures: [{kind: scatter, title: Cost, x: epsilon}]", 'figure "Cost": no row can have epsilon'),
        (
            "claims: [{says: x, above: [iid/j1, central], measure: bytes}]",
            'claim "x": not all of its rows can have bytes',
        ),
    ],
)
def test_what_no_row_can_measure_is_refused_before_anything_runs(own, section, said):
    with pytest.raises(FedsieveError, match=f'own.yaml: section "all".*{said}'):
        own(OWN.replace('rows: ["*"]}', f'rows: ["*"], {section}}}'))


def test_a_column_stands_where_one_row_of_the_section_fills_it(own):
    columns = "rows: ['*'], columns: [test_accuracy, bytes, last.drift, clients.worst]}"
    assert own(OWN.replace('rows: ["*"]}', columns)).spec.sections[0].columns[1] == "bytes"


def test_rows_are_expanded_over_all_combinations_and_words_stand_for_values(own):
    study = own()
    assert list(study.rows) == ["central", "iid/j1", "iid/j2", "nc2/j1", "nc2/j2"]
    assert study.rows["nc2/j1"].label == "Nc=2 with 1"
    experiment = study.experiment(study.rows["nc2/j2"], 5)
    assert experiment.federation.partition.nc == 2  # a partition of another kind was replaced whole
    assert (experiment.stages[0].local.epochs, experiment.seed, experiment.name) == (2, 5, "own-nc2-j2")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('rows: ["*"]', 'rows: ["nope/*"]', "no row matches nope"),
        ("base: central}", "base: centrl}", "no base centrl"),
        ("- {name: central, base: central}", "- {name: central, base: central, reported: x}", "no id x"),
        ("- {name: central,", "- {name: iid/j1,", "two rows are named iid/j1"),
        ("title: own", "titel: own", "titel"),
    ],
)
def test_a_wrong_definition_is_refused_with_the_place(own, old, new, said):
    with pytest.raises(FedsieveError, match=said):
        own(OWN.replace(old, new))


@pytest.mark.parametrize(
    ("override", "central", "federated"),
    [
        ("data.size=16", True, True),
        ("federation.cohort=0.5", False, True),
        ("federation.partition.nc=3", False, False),  # what makes the row this row
        ("federation={}", False, False),
        ("stages.all.local.epochs=9", False, False),
        ("message.up=int8", False, True),
        ("stages.all.epochs=3", True, False),
        ("stages.all.rounds=3", False, True),
        ("stages.all.optimizer.lr=1", True, True),
        ("stages.head.epochs=1", False, False),
        ("mask.rule=random", False, False),
    ],
)
def test_an_override_touches_the_rows_it_means_something_to(own, override, central, federated):
    study = own()
    assert applies(study.rows["central"], override) is central
    assert applies(study.rows["iid/j1"], override) is federated
    given = own(OWN, override)
    if not central and not federated:
        with pytest.raises(FedsieveError, match="applies to none"):
            given.select([])
        return
    given.select([])
    for name in ("central", "iid/j1"):
        changed = given.experiment(given.rows[name], 0) != study.experiment(study.rows[name], 0)
        assert changed is (central if name == "central" else federated)


def test_a_setting_of_other_rows_may_stand_where_a_folder_goes_on(own):
    given = own(OWN, "stages.all.epochs=3")
    (row,) = given.select(["iid/j1"])
    assert given.idle([row]) == ["stages.all.epochs=3"] and not given.idle(given.select([]))
    assert given.experiment(row, 0) == own().experiment(own().rows["iid/j1"], 0)


def test_seeds_and_names_are_the_studys_own(own):
    with pytest.raises(FedsieveError, match="seed=3.*sets the seeds"):
        own(OWN, "seed=3").select([])
    with pytest.raises(FedsieveError, match='"nc3/.".*--list'):
        own().select(["nc3/*"])


def test_rates_are_tried_in_every_row(own):
    study = own(OWN, rates=[0.1, 0.2])
    for row in study.rows.values():
        assert study.tune(row, study.experiment(row, 0)) == {"stages.all.optimizer.lr": [0.1, 0.2]}


@pytest.mark.parametrize(
    "rule", [{"kind": "trimmed_mean", "share": 0.4, "mix": 4}, {"kind": "multi_krum", "f": 3, "m": 6}]
)
def test_a_rule_for_many_hostile_clients_is_made_small_too(rule):
    tree = load_study("beyond").rows["hostile/sign_flip-median"].tree
    small = make_experiment(miniature(tree | {"federation": tree["federation"] | {"aggregator": rule}}))
    assert small.federation.aggregator.kind == rule["kind"]
    check_numbers(small, 3, 4)


@pytest.mark.parametrize("name", STUDIES)
def test_a_miniature_keeps_what_kind_of_experiment_a_row_is(name):
    study, tiny = load_study(name), load_study(name, smoke=True)
    for row in study.rows.values():
        before = yaml.dump(row.tree)
        small, whole = tiny.experiment(row, 0), study.experiment(row, 0)
        assert yaml.dump(row.tree) == before
        assert miniature(miniature(row.tree)) == miniature(row.tree)
        for one, two in zip(small.stages, whole.stages, strict=True):
            assert (one.name, one.train, one.method, one.sparse) == (two.name, two.train, two.method, two.sparse)
        assert (small.federation is None) == (whole.federation is None)
        assert (small.mask is None) == (whole.mask is None)
        if small.mask and whole.mask:
            kept = ("rule", "sparsity", "scope", "allocation", "granularity")
            assert all(getattr(small.mask, key) == getattr(whole.mask, key) for key in kept)
        assert bool(small.data.val_fraction) == bool(whole.data.val_fraction)
        assert small.message == whole.message
        assert small.privacy.aggregation == whole.privacy.aggregation


def test_all_files_of_studies_are_known():
    files = {file.name.removesuffix(".yaml") for file in FOLDER.iterdir() if file.name.endswith(".yaml")}
    assert files == set(STUDIES)
