"""Clients that are elsewhere give what clients in one process give, whatever happens on the way."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from tests.federation.conftest import SPARSE
from tests.federation.network import Network

from fedsieve import FedsieveError, run
from fedsieve.model.weights import FINAL
from fedsieve.privacy.secagg import PHASES
from fedsieve.runner.federated import populate
from fedsieve.runner.plan import plan
from fedsieve.runner.run import resume
from fedsieve.runner.run import run as run_with
from fedsieve.wire.envelope import unwrap, wrap
from fedsieve.wire.ledger import lines

ONE = "executor=sequential"
HEAD = "stages=[{name: head, train: head, method: ridge}, {name: all, train: backbone, sparse: true, rounds: 2, local: {steps: 2}, batch_size: 16}]"
FEEDBACK = ("message={up: int4, down: int8, error_feedback: true}", "federation.cohort=6")
SCAFFOLD = ("federation.correction={kind: scaffold}", "message={up: fp16, down: bf16}", "federation.cohort=6")
HELD = ("data.val_fraction=0", "federation.client_validation=0.2", "federation.cohort=4")
SECURE = ("privacy={aggregation: secagg, threshold: 0.6}", "federation.cohort=5")
TIERS = "federation.devices=[{share: 0.5, density: 0.5, work: 0.5}, {share: 0.5}]"
CASES = {
    "dense": ("federation.server={optimizer: adam, lr: 0.01}", "data.transform=crop_flip"),
    "shared mask": (*SPARSE, "mask.calibration_rounds=2", "mask.shrink=0.1", "message={up: int8, down: fp16}"),
    "client masks": (*SPARSE, "mask.scope=client"),
    "drawn masks": (*SPARSE, "mask.rule=random", "mask.refresh=1", TIERS),
    "new masks": (*SPARSE, "mask.refresh=1", "mask.start_sparsity=0.5", TIERS),
    "feedback": FEEDBACK,
    "scaffold": SCAFFOLD,
    "held back": (*SPARSE, *HELD, "message.down=fp16"),
    "head first": (HEAD, SPARSE[0]),
    "head alone": (HEAD, SPARSE[0], *HELD),
    "personal": (*SPARSE, "federation.personal={methods: [local, head]}"),
    "secure": (*SPARSE, *SECURE, "federation.weighting=examples"),
    "secure head": (HEAD, SPARSE[0], *HELD, *SECURE),
}
UNTOLD = ("train_loss", "drift")  # by sites whose updates are summed in secret


def weights(folder):
    return load_file(folder / FINAL)


def assert_same(one, two):
    """Equal chosen weights, and equal losses in every round: later rounds do not show in the chosen weights."""
    ours, theirs = weights(one), weights(two)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    rows = [[json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] for folder in (one, two)]
    for here, there in zip(*rows, strict=True):
        told = {"train_loss", "val_loss"} & here.keys() & there.keys()
        assert here["stage"] == there["stage"] and {key: here[key] for key in told} == {key: there[key] for key in told}


def told(folder):
    return Counter(line for line in lines(folder / "ledger.csv") if line.what not in ("envelope", "effort"))


def records(folder):
    kept = ("stage", "round", "train_loss", "drift", "val_accuracy", "cohort", "replies", "refused")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in kept if key in row and row["stage"] != "head"} for row in rows]


def population_of(experiment):
    labels = load_digits().target
    return populate(experiment, labels, np.arange(len(labels)))


@pytest.fixture(autouse=True)
def _no_page(request, monkeypatch):
    """Pages take longer than the runs of these tests."""
    if "page" not in request.node.name:
        monkeypatch.setattr("fedsieve.runner.run._write_page", lambda folder: None)


@pytest.mark.parametrize("case", CASES)
def test_sites_give_the_weights_metrics_and_ledger_of_one_process(federated, tmp_path, case):
    experiment = federated(*CASES[case], ONE)
    mine = run(experiment, tmp_path / "here")
    theirs = run_with(experiment, tmp_path / "there", transport=Network(tmp_path / "sites", 8))
    assert_same(tmp_path / "here", tmp_path / "there")
    for key in ("test_accuracy", "client_accuracy", "personal", "mask_id"):
        assert mine.get(key) == theirs.get(key)
    if case != "personal":  # which sites make by themselves, of weights that are sent once more
        assert told(tmp_path / "here") == told(tmp_path / "there")
    there = records(tmp_path / "there")
    known = [
        {key: row[key] for key in row if "secure" not in case or key not in UNTOLD}
        for row in records(tmp_path / "here")
    ]
    assert known == there


@pytest.mark.parametrize("case", ["client masks", "feedback", "scaffold", "held back", "secure"])
def test_a_site_goes_on_from_its_disk(federated, tmp_path, case):
    experiment = federated(*CASES[case], ONE, "stages.all.rounds=2")
    run(experiment, tmp_path / "here")
    run_with(experiment, tmp_path / "there", transport=Network(tmp_path / "sites", 8, restarts=True))
    assert_same(tmp_path / "here", tmp_path / "there")


class Killed(Exception):
    pass


@pytest.mark.parametrize("case", ["shared mask", "feedback", "scaffold", "held back", "secure"])
def test_a_killed_server_goes_on_with_sites_as_they_were_at_its_checkpoint(federated, tmp_path, case):
    """It ends when some sites have answered, and have moved on, and others have not."""
    experiment = federated(*CASES[case], ONE)

    def kill(node, number, reply):
        if number == 4 and node >= 104:
            raise Killed
        return reply

    run(experiment, tmp_path / "here")
    network = Network(tmp_path / "sites", 8, kill)
    with pytest.raises(Killed):
        run_with(experiment, tmp_path / "there", transport=network)
    network.meddle = None
    resume(tmp_path / "there", transport=network)
    assert_same(tmp_path / "here", tmp_path / "there")
    assert told(tmp_path / "here") == told(tmp_path / "there")


def damage(reply, what):
    """The reply with one bit of a message turned over."""
    head, messages = unwrap(reply)
    place = head["parts"].index(what)
    messages[place] = messages[place][:-1] + bytes([messages[place][-1] ^ 1])
    return wrap(head, messages)


@pytest.mark.parametrize("setting", [FEEDBACK, SCAFFOLD])
def test_what_a_site_remembers_after_a_refusal_is_what_a_client_in_one_process_does(federated, tmp_path, setting):
    """Late replies in one process, and damaged ones on the way from sites, for the same clients and rounds."""
    late = "federation.failures={deadline: 1.0}", "federation.devices=[{share: 0.4, delay: 1.5}, {share: 0.6}]"
    setting = (*setting, "stages.all.rounds=5", "data.val_fraction=0")  # no validation: the last round is kept
    run(federated(*setting, *late, ONE), tmp_path / "here")
    told = [line for line in lines(tmp_path / "here" / "ledger.csv") if line.what == "update"]
    missed = {(line.client, line.round) for line in told if line.status == "late"}
    assert len({number for _, number in missed}) > 1
    # What a client remembers of a refusal shows only in an update that is accepted later.
    taken = {(line.client, line.round) for line in told if line.status == "ok"}
    assert any((client, later) in taken for client, number in missed for later in range(number + 1, 6))

    def meddle(node, number, reply):
        head, _ = unwrap(reply)
        if head["ask"] == "train" and (node - 100, head["round"] + 1) in missed:
            reply = damage(reply, "update")
        return reply

    network = Network(tmp_path / "sites", 8, meddle, restarts=True)
    run_with(federated(*setting, ONE), tmp_path / "there", transport=network)
    assert_same(tmp_path / "here", tmp_path / "there")
    refused = {line[1:3][::-1] for line in lines(tmp_path / "there" / "ledger.csv") if line.status == "checksum"}
    assert refused == missed


def test_sites_that_fall_silent_lie_or_lose_their_files_cost_their_own_updates_only(federated, tmp_path):
    experiment = federated(*SPARSE, ONE, "federation.cohort=8", "stages.all.rounds=6", "federation.minimum_replies=2")
    said = Counter()

    def meddle(node, number, reply):
        head, messages = unwrap(reply)
        said[head.get("kind")] += 1
        if head.get("round") == 1:
            if node == 107:
                network.lose_files(node)
            return {
                100: "late",
                101: "crash",
                102: b"garbage, and more of it than a frame",
                103: reply[:-9],
                104: wrap(head),
                105: wrap({**head, "round": 9}, messages),
            }.get(node, reply)
        return reply

    network = Network(tmp_path / "sites", 8, meddle)
    run_with(experiment, tmp_path / "run", transport=network)
    status = {
        (line.client, line.round): line.status
        for line in lines(tmp_path / "run" / "ledger.csv")
        if line.what == "update"
    }
    assert [status[client, 2] for client in range(8)] == [
        "late",
        "crash",
        "magic",
        "length",
        "head",
        "head",
        "ok",
        "ok",
    ]
    assert status[7, 3] == "run"  # it had to be met again
    sizes = {
        line.client: line.size
        for line in lines(tmp_path / "run" / "ledger.csv")
        if line[1] == 2 and line.what == "update"
    }
    assert sizes[0] == sizes[1] == 0 and sizes[2] == 36  # nothing came, or what came
    assert all(status[client, number] == "ok" for client in range(7) for number in (1, 3, 4, 5, 6))
    assert status[7, 4] == "ok" and said["run"] == 1
    counted = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    assert counted["replies"] == 2 and counted["refused"] == {"late": 1, "crash": 1, "magic": 1, "length": 1, "head": 2}


def test_a_round_without_enough_sites_changes_nothing_and_the_next_goes_on(federated, tmp_path):
    experiment = federated(ONE, "federation.cohort=8", "federation.minimum_replies=3")
    network = Network(tmp_path / "sites", 8)

    def meddle(node, number, reply):
        network.gone = set(range(100, 106)) if unwrap(reply)[0].get("round") == 0 else set()
        return reply

    network.meddle = meddle
    run_with(experiment, tmp_path / "run", transport=network)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["replies"] for row in rows] == [8, 2, 8]
    assert rows[1]["refused"] == {"unavailable": 6, "too few replies": 2} and rows[1]["val_loss"] == rows[0]["val_loss"]


def test_too_few_sites_in_a_calibration_end_the_run_and_it_can_go_on(federated, tmp_path):
    experiment = federated(*SPARSE, ONE, "mask.clients=8", "federation.minimum_replies=3")
    network = Network(
        tmp_path / "sites", 8, lambda node, number, reply: "late" if number == 2 and node > 101 else reply
    )
    with pytest.raises(FedsieveError, match="2 of 8 sites sent their scores"):
        run_with(experiment, tmp_path / "run", transport=network)
    resume(tmp_path / "run", transport=network)
    run(experiment, tmp_path / "here")
    assert_same(tmp_path / "here", tmp_path / "run")


HEAD_ROUNDS = "stages=[{name: head, train: head, rounds: 1, local: {steps: 2}, batch_size: 16}, {name: all, train: backbone, sparse: true, rounds: 2, local: {steps: 2}, batch_size: 16}]"


def away(folder, asked_before, asked_meanwhile):
    """A network whose node 101 is gone from the answers to one question until those to another."""

    def meddle(node, number, reply):
        head, _ = unwrap(reply)
        if (head.get("ask"), head.get("stage")) == asked_before:
            network.gone = {101}
        elif head.get("ask") == asked_meanwhile:
            network.gone = set()
        return reply

    network = Network(folder, 8, meddle)
    return network


def test_a_site_that_is_away_during_a_calibration_hears_what_it_missed_before_its_update_counts(federated, tmp_path):
    experiment = federated(HEAD_ROUNDS, SPARSE[0], ONE, "mask.clients=8", "federation.cohort=8")
    run_with(experiment, tmp_path / "run", transport=away(tmp_path / "sites", ("train", "head"), "scores"))
    told = [line for line in lines(tmp_path / "run" / "ledger.csv") if line.stage == "all" and line.client == 1]
    assert [line.status for line in told if line.what == "scores"] == ["unavailable"]
    what = [(line.what, line.status) for line in told]
    assert what.count(("update", "ok")) == 2
    assert what.index(("context", "ok")) < what.index(("update", "ok"))


def test_a_site_that_missed_the_statistics_of_a_head_stays_out_of_its_losses(federated, tmp_path):
    """It has not heard how the backbone moved, so its losses would be of other features."""
    stages = "stages=[{name: all, train: backbone, rounds: 1, local: {steps: 2}, batch_size: 16}, {name: head, train: head, method: ridge}]"
    experiment = federated(stages, ONE, "data.val_fraction=0", "federation.cohort=8")
    run_with(experiment, tmp_path / "run", transport=away(tmp_path / "sites", ("train", "all"), "statistics"))
    told = [line for line in lines(tmp_path / "run" / "ledger.csv") if line.stage == "head"]
    assert {line.client for line in told if line.what == "losses"} == {0, *range(2, 8)}
    assert [(line.what, line.status) for line in told if line.client == 1] == [("statistics", "unavailable")]
    record = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["replies"] == 7 and record["refused"] == {"unavailable": 1}


def digits(folder, rows, names=None):
    """Some digits as images in class folders."""
    bunch = load_digits()
    for row in rows:
        name = (names or {}).get(int(bunch.target[row]), f"digit {bunch.target[row]}")
        file = folder / name / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((bunch.images[row] * 15.9).astype("uint8")).save(file)
    return str(folder)


OWN = (
    "data.source=none",
    f"data.class_names={[f'digit {number}' for number in range(10)]}",
    "federation.clients=3",
    "federation.cohort=3",
    "federation.partition={kind: sites}",
    "federation.client_validation=0.2",
    ONE,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three sites' images: of all digits, of the first five, and of some others."""
    home, target = tmp_path_factory.mktemp("data"), load_digits().target
    return [
        digits(home / "a", range(150)),
        digits(home / "b", [row for row in range(150, 400) if target[row] < 5]),
        digits(home / "c", range(400, 480)),
    ]


def own_network(tmp_path, folders):
    network = Network(tmp_path / "sites", 3)
    network.places = {100 + site: network.place(site, data=folder) for site, folder in enumerate(folders)}
    return network


def test_sites_with_images_of_their_own_and_a_server_without_any_give_a_page(federated, tmp_path, folders):
    summary = run_with(federated(*OWN), tmp_path / "run", transport=own_network(tmp_path, folders))
    seen = [sum(1 for _ in (tmp_path / "sites" / str(site)).glob("*/sent.jsonl")) for site in range(3)]
    assert seen == [1, 1, 1]
    images = sum(len(list(Path(folder).glob("*/*.png"))) for folder in folders)
    assert summary["train_images"] + summary["test_images"] == images and summary["val_images"] == 0
    assert 0 < summary["test_accuracy"] <= 1 and summary["client_accuracy"]["clients"] == 3
    assert summary["stages"]["all"]["client_val_accuracy"] is not None
    assert (tmp_path / "run" / "report.html").exists() and not (tmp_path / "run" / "predictions.npz").exists()


def test_a_server_that_holds_images_validates_and_tests_on_them(federated, tmp_path, folders):
    held = digits(tmp_path / "held", range(480, 600))
    experiment = federated(*OWN, f"data.source={json.dumps(held)}", "federation.client_validation=0.0")
    summary = run_with(experiment, tmp_path / "run", transport=own_network(tmp_path, folders))
    assert (summary["val_images"], summary["test_images"]) == (96, 24) and summary["val_accuracy"] is not None
    assert (tmp_path / "run" / "predictions.npz").exists()


def test_the_log_of_a_site_is_what_the_server_got_from_it(federated, tmp_path, folders):
    experiment = federated(*OWN, *SPARSE, "message={up: int8, down: fp16}")
    run_with(experiment, tmp_path / "run", transport=own_network(tmp_path, folders))
    got = [line for line in lines(tmp_path / "run" / "ledger.csv") if line.direction == "up"]
    for site in range(3):
        (file,) = (tmp_path / "sites" / str(site)).glob("*/sent.jsonl")
        sent = [json.loads(line) for line in file.read_text().splitlines()]
        parts = Counter(
            (row["what"], row["round"], row["bytes"]) for row in sent if row["what"] not in ("envelope", "images")
        )
        assert parts == Counter(
            line[4:5] + line[1:2] + line[5:6] for line in got if line.client == site and line.what != "envelope"
        )
        whole = sum(row["bytes"] for row in sent if row["what"] == "envelope" and row["ask"] != "hello")
        assert whole == sum(line.size for line in got if line.client == site)
        update = next(row for row in sent if row["what"] == "update")
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert update["mask"] == summary["mask_id"]
        assert next(row for row in sent if row["what"] == "effort")["metrics"]["images"] > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data": "other"}, 'class 2 is "digit 3" here and "digit 2" at the server'),
        ({"data": None}, "names none"),
        ({"client": 7}, "there is no site 7"),
        ({"weights": "none.safetensors"}, "none.safetensors"),
        ({"accepted": "0" * 64}, "another experiment than the one that the site has accepted"),
    ],
)
def test_a_site_that_does_not_match_is_refused_with_the_reason(federated, tmp_path, folders, change, reason):
    held = digits(tmp_path / "held", range(480, 600))
    experiment = federated(*OWN, f"data.source={json.dumps(held)}", "data.class_names=null")
    full = digits(tmp_path / "c", range(400, 480))
    network = own_network(tmp_path, [folders[0], digits(tmp_path / "b", range(150, 300)), full])
    place = {"data": full, "client": 2} | change
    if place["data"] == "other":
        place["data"] = digits(tmp_path / "d", range(400, 480), {2: "digit two"})
    client = place.pop("client")
    network.places[102] = network.place(client, **place)
    with pytest.raises(FedsieveError, match="2 of 3 sites are here") as caught:
        run_with(experiment, tmp_path / "run", transport=network)
    assert reason in str(caught.value) and "node 102" in str(caught.value)


def test_an_unknown_class_is_refused_where_the_label_map_is_given(federated, tmp_path, folders):
    network = own_network(tmp_path, [*folders[:2], digits(tmp_path / "d", range(400, 480), {2: "digit two"})])
    with pytest.raises(FedsieveError, match='has a class "digit two", which is not in the label map'):
        run_with(federated(*OWN), tmp_path / "run", transport=network)


def test_weights_and_versions_must_be_the_servers(federated, tmp_path):
    def other(key, value):
        def meddle(node, number, reply):
            return reply

        network = Network(tmp_path / f"sites {key}", 8, meddle)
        ask = network.ask
        network.ask = lambda messages: ask(
            {node: wrap({**unwrap(message)[0], key: value}) for node, message in messages.items()}
        )
        with pytest.raises(FedsieveError) as caught:
            run_with(federated(ONE), tmp_path / f"run {key}", transport=network)
        return str(caught.value)

    assert "install the same" in other("version", "9.9")
    assert "the pretrained weights are not the server's" in other("weights", "0" * 32)


def test_two_nodes_cannot_be_one_site(federated, tmp_path):
    network = Network(tmp_path / "sites", 8)
    network.places[108] = network.places[103]
    run_with(federated(ONE, "federation.cohort=8"), tmp_path / "run", transport=network)
    asked = [line for line in lines(tmp_path / "run" / "ledger.csv") if line.what == "update" and line.round == 1]
    assert sorted(line.client for line in asked) == list(range(8))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["federation.failures.crash=0.1"], "federation.failures.crash is simulated"),
        (
            ["federation.devices=[{delay: 2.0}]", "federation.failures.deadline=5.0"],
            "federation.devices.delay is simulated",
        ),
        (["federation.attack={kind: sign_flip}"], "federation.attack is simulated"),
        (["privacy={aggregation: zero_sum}"], "zero_sum is for comparison"),
        (["federation.blend=true"], "federation.blend does not work with sites"),
        (["federation.personal={}", *SPARSE, "mask.scope=client"], "federation.personal does not go with"),
        ([*SPARSE, "mask.scope=public", "data.val_fraction=0"], "public is scored on images that the server holds"),
    ],
)
def test_what_works_in_one_process_only_is_refused_at_the_start(federated, tmp_path, overrides, reason):
    network = Network(tmp_path / "sites", 8)
    with pytest.raises(FedsieveError, match=reason):
        run_with(federated(*overrides), tmp_path / "run", transport=network)
    assert network.asked == 0 and not (tmp_path / "run").exists()


def test_runs_with_sites_and_without_are_not_confused(federated, tmp_path):
    with pytest.raises(FedsieveError, match="`fedsieve flower` runs with them"):
        run(federated(*OWN), tmp_path / "alone")
    with pytest.raises(FedsieveError, match="`fedsieve flower` runs with them"):
        plan(federated(*OWN))

    def kill(node, number, reply):
        if number == 3:
            raise Killed
        return reply

    with pytest.raises(Killed):
        run_with(federated(ONE), tmp_path / "run", transport=Network(tmp_path / "sites", 8, kill))
    with pytest.raises(FedsieveError, match="the clients of this run are sites"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("phase", ["advertise", "share", "pad", "reveal"])
def test_a_secure_sum_of_sites_is_of_those_who_sent_their_values_whoever_dies_when(federated, tmp_path, phase):
    """One of five falls out for good in one phase of the first round: what comes of it is the mean of the others, or of all."""
    experiment = federated(ONE, *SECURE, "stages.all.rounds=1", "privacy.threshold=0.8")
    (lost, *_), clients = np.sort(population_of(experiment).cohort("all", 0)), 5

    def meddle(node, number, reply):
        head, _ = unwrap(reply)
        if head.get("ask") == "sum":
            asked[node] = asked.get(node, -1) + 1
            if node == 100 + lost and asked[node] == PHASES.index(phase):
                return "crash"
        return reply

    asked = {}
    run_with(experiment, tmp_path / "there", transport=Network(tmp_path / "sites", 8, meddle, restarts=True))
    (row,) = [json.loads(line) for line in (tmp_path / "there" / "metrics.jsonl").read_text().splitlines()]
    assert row["replies"] == clients - (phase != "reveal")
    assert row["refused"] == ({} if phase == "reveal" else {"crash": 1})
    crashed = {(line.client, line.what) for line in lines(tmp_path / "there" / "ledger.csv") if line.status == "crash"}
    assert crashed == {(int(lost), f"update.{phase}")}
    # Weights are what the plain mean of the same clients gives, to the width of the fixed point.
    drop = [] if phase == "reveal" else [100 + int(lost)]

    def silent(node, number, reply):
        return "crash" if node in drop and unwrap(reply)[0].get("ask") == "train" else reply

    plain = federated(ONE, "federation.cohort=5", "stages.all.rounds=1")
    run_with(plain, tmp_path / "plain", transport=Network(tmp_path / "others", 8, silent))
    ours, theirs = weights(tmp_path / "there"), weights(tmp_path / "plain")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in ours)


def test_a_site_refuses_a_secure_sum_of_fewer_than_three(federated, tmp_path):
    """In a sum of two, each learns what the other sent. The server claims such a sum in every question."""
    network, answered = Network(tmp_path / "sites", 8), []

    def alone(messages):
        for node, message in messages.items():
            head, parts = unwrap(message)
            if head["ask"] == "sum":
                messages = {**messages, node: wrap({**head, "clients": 2}, parts)}
        return ask(messages)

    def note(node, number, reply):
        head, messages = unwrap(reply)
        if head["ask"] == "sum":
            answered.append((head.get("problem"), messages))
        return reply

    ask, network.ask, network.meddle = network.ask, alone, note
    run_with(federated(ONE, *SECURE, "stages.all.rounds=1"), tmp_path / "run", transport=network)
    assert len(answered) == 5 and all("hides nothing" in problem and not sent for problem, sent in answered)


def test_a_site_reveals_the_same_values_to_one_group_of_others_only(federated, tmp_path):
    """A server that is killed after a sum, and repeats it with fewer sites, would learn what the missing one sent."""
    experiment = federated(ONE, *SECURE, "stages.all.rounds=1", "privacy.threshold=0.6")
    lost = int(np.sort(population_of(experiment).cohort("all", 0))[0])

    def kill(node, number, reply):
        if unwrap(reply)[0].get("ask") == "sum" and number == 6 and node != 100 + lost:
            last.append(node)
            if len(last) == 4:
                raise Killed
        return reply

    def fewer(node, number, reply):
        return "crash" if node == 100 + lost and unwrap(reply)[0].get("ask") == "sum" else reply

    last = []
    network = Network(tmp_path / "sites", 8, kill)
    with pytest.raises(Killed):
        run_with(experiment, tmp_path / "run", transport=network)
    network.meddle = fewer
    resume(tmp_path / "run", transport=network)
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["replies"] == 0 and row["refused"] == {"crash": 1, "site": 4}
    states = [file for file in (tmp_path / "sites").glob("*/*/memory/sum.json")]
    assert states and all(file.stat().st_mode & 0o077 == 0 for file in states)
