"""Studies as data: what their files say becomes rows that can run, whole and in miniature."""

import itertools
import json
import re
from dataclasses import replace
from string import Template

import pytest
import yaml

from fedsieve.campaign.definition import FOLDER, STUDIES, applies, load_reported, load_study, miniature
from fedsieve.config import make_experiment
from fedsieve.errors import FedsieveError
from fedsieve.federation.means import check_numbers
from fedsieve.report.html import flatten
from fedsieve.report.measures import OF_MASKS, OF_STAGES, SPREADS
from fedsieve.report.summary import Spread, StageSummary
from fedsieve.runner.run import run

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
            rows = {row.name: row for pattern in section.rows for row in study.matching([pattern])}
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
        if sieve and (not sieve.rule.scored or (sieve.shrink == 1 and sieve.fisher.labels)):
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
        ("columns: [bytes / nobody]", "no bytes of a row nobody"),
        ("columns: [bytes / central]", "no bytes of a row central"),  # which sends nothing
        ("figures: [{kind: curves, title: Curve, y: test_acuracy}]", 'figure "Curve": curves show a field'),
        ("figures: [{kind: curves, title: Curve, x: rounds}]", 'figure "Curve": curves show a field'),
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


def is_length(key):
    return key.startswith("stages.") and key.endswith((".rounds", ".epochs")) and key.count(".") == 2


def what_rows_set(spec):
    """By row: its own settings with their values, and True where `each` gives them."""
    found = {}
    for item in spec.rows:
        for values in itertools.product(*item.each.values()):
            words = dict(zip(item.each, values, strict=True))
            name = Template(item.name).substitute(words)
            found[name] = {key: (value, "$" in str(value)) for key, value in item.set.items()}
    return found


RULES = "random|(?:high|low)_(?:magnitude|hybrid)|(?:least|most)_sensitive"
SPOKEN = (  # what words of names and labels say, by the setting that they say it of
    (rf"(?:^|[/-])({RULES})(?=[/-]|$)", "mask.rule"),
    (r"(?:^|[/-])(iid|nc\d+|dir[\d.]+)(?=[/-]|$)", "federation.partition"),
    (r"(?:^|[/-])s(0\.\d+)(?=[/-]|$)", "mask.sparsity"),
    (r"(0\.\d+) frozen", "mask.sparsity"),
    (r"(?:^|[/-])c(\d+)(?=[/-]|$)", "mask.calibration_rounds"),
    (r"(\d+) calibration rounds", "mask.calibration_rounds"),
    (r"(?:^|[/-])j(\d+)(?=[/-]|$)", "last.local"),
    (r"(?:^|[/-])e(\d+)(?=[/-]|$)", "last.epochs"),
    (r"(?<!every )(\d+) epochs", "last.epochs"),
    (r"(?:^|[/-])r(\d+)(?=[/-]|$)", "last.rounds"),
    (r"(?<!every )(?<!of )\b(\d+) rounds", "last.rounds"),
)


def what_names_say(row, experiment):
    """The settings that a row's name or label speaks of."""
    for pattern, key in SPOKEN:
        for found in re.findall(pattern, f"{row.name}\n{row.label}", re.M):
            last = experiment.stages[-1]
            work = "steps" if last.local.steps else "epochs"
            place = key.replace("last.local", f"last.local.{work}").replace("last", f"stages.{last.name}", 1)
            if experiment.mask or not key.startswith("mask"):
                yield place, found


@pytest.mark.parametrize("name", STUDIES)
def test_no_override_changes_what_names_a_row(name):
    """Neither what the row sets, nor what tells it from the rows of its group, nor what its name and label say:
    under any spelling it is refused, or the row stays as it is."""
    study, own = load_study(name), what_rows_set(load_study(name).spec)
    experiments = {row.name: study.experiment(row, 0) for row in study.rows.values()}
    settings = {row: flatten(experiment.model_dump(mode="json")) for row, experiment in experiments.items()}
    for row in study.rows.values():
        group = [own[other] for other in own if other.partition("/")[0] == row.group]
        from_each = {key for one in group for key, (_, each) in one.items() if each}
        keys = {*own[row.name], *(key for one in group for key, (value, _) in one.items() if value is not None)}
        keys -= {"stages", *(key for key in keys if is_length(key) and key not in from_each)}
        keys -= {"model.weights"} if row.name == "central/pretrained" else set()  # a file of them will do: below
        keys |= {key for key, _ in what_names_say(row, experiments[row.name])}
        for key in keys:
            leaves = [leaf for leaf in settings[row.name] if f"{leaf}.".startswith(f"{key}.")]
            for leaf in leaves:
                now = settings[row.name][leaf]
                others = [settings[other].get(leaf, now) for other in settings]
                number = isinstance(now, (int, float)) and not isinstance(now, bool)
                others += [now + 1, now / 2] if number else []
                different = next((other for other in others if other != now), "random")
                for spelled in spellings(leaf, experiments[row.name]):
                    override = f"{spelled}={json.dumps(different)}"
                    given = replace(study, overrides=(override,))
                    try:
                        changed = given.experiment(row, 0)
                    except FedsieveError:
                        continue
                    assert changed == experiments[row.name], f"{row.name}: {override}"


def spellings(key, experiment):
    """The names of one setting: stages by number, and the mask of the last stage."""
    yield key
    first, *rest = key.split(".")
    if first == "stages" and rest:
        places = [stage.name for stage in experiment.stages]
        yield ".".join([first, str(places.index(rest[0])), *rest[1:]])
    if first == "mask":
        yield f"stages.{experiment.stages[-1].name}.{key}"


@pytest.mark.parametrize("name", STUDIES)
def test_what_a_stage_trains_stays_under_any_override(name):
    study = load_study(name)
    for row in study.rows.values():
        stage = row.tree["stages"][-1]["name"]
        for override in (
            f"stages.{stage}.train=lora",
            f"stages.{stage}.sparse=true",
            f"stages.{stage}.name=x",
            f"stages.{stage}={{}}",
            "stages=[]",
        ):
            assert not applies(row, override), (row.name, override)
        for dense in (stage for stage in row.tree["stages"] if not stage.keys() & {"sparse", "mask"}):
            assert not applies(row, f"stages.{dense['name']}.mask={{rule: random}}"), row.name


def test_rows_from_pretrained_weights_take_a_file_of_them_and_never_random_ones():
    study = load_study("overlap")
    pretrained, scratch, other = (
        study.rows[name] for name in ("central/pretrained", "central/scratch", "masks/random")
    )
    assert applies(pretrained, "model.weights=FILE") and not applies(scratch, "model.weights=FILE")
    assert not applies(pretrained, "model.weights=none") and applies(other, "model.weights=none")


def test_rates_are_not_tried_in_rows_that_are_named_by_theirs(own):
    study = load_study("editing", rates=[0.5])
    named, free = study.rows["central-grid/lr0.1-m0.8"], study.rows["fedavg/iid-j4"]
    assert study.tune(named, study.experiment(named, 0)) == {}
    assert study.tune(free, study.experiment(free, 0)) == {"stages.head.optimizer.lr": [0.5]}


def test_lengths_may_be_changed_where_no_name_says_them():
    study = load_study("editing")
    assert applies(study.rows["edit/iid-s0.9-c5"], "stages.edit.rounds=20")
    for row, override in (
        ("fedavg/iid-r20", "stages.head.rounds=5"),
        ("fedavg/iid-j16", "stages.0.rounds=5"),  # its rounds follow from its steps
        ("central/head-e20", "stages.head.epochs=5"),
    ):
        assert not applies(study.rows[row], override)


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


def test_measures_are_fields_of_what_runs_write():
    assert OF_STAGES.keys() | OF_MASKS.keys() <= StageSummary.model_fields.keys()
    assert set(SPREADS) <= Spread.model_fields.keys()


def test_a_table_is_rows_and_overrides_that_the_command_line_may_change(own):
    tables = """
tables:
  wide: {overrides: [data.size=16, stages.all.rounds=3], rates: [0.5], rows: [iid/*], seeds: 2}
"""
    study = own(OWN + tables, "data.size=32", table="wide")
    assert study.overrides == ("data.size=16", "stages.all.rounds=3", "data.size=32") and study.rates == (0.5,)
    assert own(OWN + tables, smoke=True, table="wide").overrides == ()
    (row, _) = study.select(study.spec.tables["wide"].rows)
    assert (study.experiment(row, 0).data.size, study.experiment(row, 0).stages[0].rounds) == (32, 3)
    with pytest.raises(FedsieveError, match='no "wid".*Did you mean "wide".*Allowed: wide'):
        own(OWN + tables, table="wid")
    with pytest.raises(FedsieveError, match="table wide: no row matches nope"):
        own(OWN + tables.replace("iid/*", "nope"))


@pytest.mark.parametrize("name", STUDIES)
def test_every_override_of_a_table_changes_some_of_its_rows_and_suits_all(name):
    for table, spec in load_study(name).spec.tables.items():
        study = load_study(name, table=table)
        rows = study.select(spec.rows)
        assert not study.idle(rows), table


def test_all_files_of_studies_are_known():
    files = {file.name.removesuffix(".yaml") for file in FOLDER.iterdir() if file.name.endswith(".yaml")}
    assert files == set(STUDIES)
