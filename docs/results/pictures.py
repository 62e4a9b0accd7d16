"""Draw the pictures of index.md from the tables beside it: `uv run python docs/results/pictures.py`."""

import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean, stdev

from fedsieve.report.series import Point, Scale, dots, lines

HERE = Path(__file__).parent
PARTITIONS = {"iid": "IID", "nc50": "50", "nc10": "10", "nc5": "5", "nc1": "1"}
ACCURACY = "test accuracy, %"


def table(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def point(x: object, rows: Iterable[Mapping[str, str]], reported: float | None = None) -> Point:
    """Mean and standard deviation over seeds, in percent."""
    values = [100 * float(row["test_accuracy"]) for row in rows]
    return Point(x, mean(values), stdev(values) if len(values) > 1 else None, reported)


def percent(value: float) -> str:
    return f"{value:.1f}"


def rules() -> str:
    found = defaultdict(list)
    for row in table("rules.csv"):
        if row["phase"] == "final" and row["size"] == "128" and row["rule"] != "dense":
            found[row["rule"], float(row["sparsity"])].append(row)
    names = [
        "high_magnitude",
        "random",
        "low_hybrid",
        "high_hybrid",
        "low_magnitude",
        "most_sensitive",
        "least_sensitive",
    ]
    series = {name: [point(share, found[name, share]) for share in (0.5, 0.9, 0.99)] for name in names}
    return lines(series, "share of the backbone that is frozen", Scale(ACCURACY))


def skew() -> str:
    phases, federation = {}, table("federation.csv")
    for name, phase, job in (
        ("one step a round, 13.7 GB", "budget", "b-"),
        ("one step a round, 2.2 GB", "tenth", "c-"),
        ("four epochs a round, 7.5 GB", "drift", "drift-"),
    ):
        phases[name] = [
            point(word, [row for row in federation if row["phase"] == phase and row["job"] in (job + key, job + word)])
            for key, word in PARTITIONS.items()
        ]
    heads = table("studies/secure-runs.csv")
    phases["head alone, 20 rounds"] = [
        point(word, [row for row in heads if row["row"] == f"fedavg/{key}"]) for key, word in PARTITIONS.items()
    ]
    return lines(phases, "classes per client", Scale(ACCURACY))


def cost() -> str:
    found = defaultdict(list)
    for row in table("federation.csv"):
        found[row["job"]].append(row)
    names, points = [], []
    for label, job in {
        "one step, a tenth, int4": "c-iid",
        "one step, a tenth, int8": "iid-.9-int8",
        "four epochs, client masks, fp32": "drift-iid",
        "one step, three tenths, int8": "b-iid",
        "one step, a tenth, fp32": "iid-.9-fp32",
    }.items():
        sent = mean(int(row["bytes_up"]) + int(row["bytes_down"]) for row in found[job] if row["bytes_up"])
        names.append(f"{sent / 1e9:.1f} GB: {label}")
        points.append(point(None, found[job]))
    return dots(names, points, Scale(ACCURACY), percent)


def sums() -> str:
    rows = table("studies/secure-runs.csv")
    names = {
        "whole head, plain mean": "plain",
        "whole head, zero-sum pads": "zero_sum",
        "whole head, secagg": "secagg",
        "a fifth of it, plain mean": "sparse-plain",
        "a fifth of it, zero-sum pads": "sparse-zero_sum",
        "a fifth of it, secagg": "sparse-secagg",
    }
    points = [point(None, [row for row in rows if row["row"] == f"sums/{name}"]) for name in names.values()]
    return dots(list(names), points, Scale(ACCURACY), percent)


def start() -> str:
    """The rules at 0.9 frozen, with a head that is new and one that was trained first."""
    studies = {
        "new head, central": ("overlap", "sparse-rates/{}-s0.9"),
        "new head, IID": ("editing", "rules-rates/iid-{}"),
        "head first, Nc=1": ("beyond", "rules/{}-tensor-s0.9"),
    }
    names, points = [], []
    for label, (study, form) in studies.items():
        runs = table(f"studies/{study}-runs.csv")
        for rule in ("most_sensitive", "least_sensitive", "random", "high_magnitude"):
            names.append(f"{label}: {rule.replace('_', ' ')}")
            points.append(point(None, [run for run in runs if run["row"] == form.format(rule)]))
    return dots(names, points, Scale(ACCURACY), percent)


def overlap() -> str:
    """How far clients' masks agree."""
    found = [row for row in table("studies/overlap.csv") if row["measure"] == "jaccard"]
    names = [row["label"].replace("high hybrid", "high hybrid, mostly by magnitude") for row in found]
    points = [Point(None, float(row["mean"]), float(row["std"]), None) for row in found]
    below = "Jaccard index of two clients' masks, scored through a random head"
    return dots(names, points, Scale(below), "{:.2f}".format)


def six() -> str:
    """Six rules with a new head, by the share that is frozen."""
    runs = table("studies/overlap-rules-runs.csv")
    rules = ("high_hybrid", "most_sensitive", "low_magnitude", "random", "high_magnitude", "least_sensitive")
    series = {
        rule: [
            point(float(share), [run for run in runs if run["row"] == f"sparse/{rule}-s{share}"])
            for share in ("0.1", "0.3", "0.5", "0.7", "0.9")
        ]
        for rule in rules
    }
    return lines(series, "share of the network that is frozen", Scale(ACCURACY))


def epochs() -> str:
    """FedAvg of a head over shards and local epochs."""
    return by_work("overlap-heads", "local epochs a round, 50 rounds")


def privacy() -> str:
    runs = table("studies/privacy-runs.csv")
    words = {"eps2.0": "2", "eps8.0": "8", "eps32.0": "32", "none": "no noise"}
    series = {
        name: [point(word, [run for run in runs if run["row"] == f"dp/{key}-{kind}"]) for key, word in words.items()]
        for name, kind in {"whole head": "dense", "a tenth of it": "sparse"}.items()
    }
    return lines(series, "epsilon", Scale(ACCURACY))


def named(study: str, names: Mapping[str, str]) -> str:
    """Rows of a study, by the names they are shown with."""
    return gathered({name: (study, row) for name, row in names.items()})


def gathered(names: Mapping[str, tuple[str, str]]) -> str:
    """Rows of several studies, by the names they are shown with."""
    runs = {study: table(f"studies/{study}-runs.csv") for study, _ in names.values()}
    points = [point(None, [run for run in runs[study] if run["row"] == row]) for study, row in names.values()]
    return dots(list(names), points, Scale(ACCURACY), percent)


def chance() -> str:
    rules = {"random": "random", "large and sensitive": "high_hybrid", "largest": "high_magnitude"}
    rules |= {"smallest": "low_magnitude", "most sensitive": "most_sensitive", "least sensitive": "least_sensitive"}
    names = {f"{s} frozen: {name}": f"rules/{rule}-tensor-s{s}" for s in (0.9, 0.99) for name, rule in rules.items()}
    return named("beyond", {"everything": "rules/dense"} | names)


def crossed(study: str, form: str, outer: Mapping[str, str], inner: Mapping[str, str]) -> str:
    """Rows whose names have one word of each kind, by both of their names."""
    return named(study, {f"{a}: {b}": form.format(x, y) for a, x in outer.items() for b, y in inner.items()})


def ways() -> str:
    kinds = {"everything and head": "full", "LoRA and head": "lora", "head in closed form": "linear"}
    kinds |= {"largest tenth, head frozen": "sparse-high_magnitude", "random tenth, head frozen": "sparse-random"}
    return crossed("personalization", "{1}/{0}", {"IID": "iid", "1 class": "nc1"}, kinds)


def five() -> str:
    rules = ("high_magnitude", "random", "least_sensitive", "most_sensitive")
    masks = {f"a tenth, {rule.replace('_', ' ')}, head frozen": f"sparse-{rule}" for rule in rules}
    kinds = {"everything and head": "full", "LoRA and head": "lora", "adapters and head": "adapter"}
    kinds |= {"last three blocks and MLP head": "last-blocks", "MLP head": "mlp", "head in closed form": "linear"}
    return named("personalization-nc5", {name: f"{kind}/nc5" for name, kind in (kinds | masks).items()})


def server() -> str:
    kinds = {"mean": "server/sgd", "momentum, rate 0.1": "server/momentum", "momentum, rate 0.3": "format/int8"}
    return named("beyond", kinds | {kind.title(): f"server/{kind}" for kind in ("yogi", "adam", "adagrad")})


def anew() -> str:
    made = {"never": "never", "every 100 rounds": "100", "every 50": "50"}
    whose = {"all clients' scores": "shared", "the server's images": "public", "each client for itself": "client"}
    rows = {f"5 classes, mask by {name}": ("scope", f"scope/{kind}-least_sensitive") for name, kind in whose.items()}
    rows |= {f"1 class, mask anew {name}": ("beyond", f"refresh/least_sensitive-{k}") for name, k in made.items()}
    return gathered(rows)


def first() -> str:
    """Head first, or everything at once."""
    central = {"everything at once": "scenario-2", "head, then half of the backbone": "scenario-1"}
    central |= {"head, then half of everything": "scenario-3", "head alone": "head"}
    rows = {f"central: {name}": ("drift-central", f"table1/{row}") for name, row in central.items()}
    across = {"everything at once": "scenarios/at-once", "head, then half of the backbone": "table2/nc10-j4"}
    return gathered(rows | {f"Nc=10: {name}": ("drift", row) for name, row in across.items()})


def own() -> str:
    """How clients fare on their own classes, by the shared model and by what they trained further."""
    names, points = [], []
    for shards, study, row in (
        ("5 classes", "personalization-nc5", "sparse-high_magnitude/nc5"),
        ("Dirichlet 0.1", "personalization-dir0.1", "sparse-high_magnitude/dir0.1"),
        ("IID", "personalization", "sparse-high_magnitude/iid"),
    ):
        found = {line["measure"]: line for line in table(f"studies/{study}.csv") if line["row"] == row}
        measures = {
            "shared model": "clients.mean",
            "own head": "personal.head.mean",
            "own model": "personal.local.mean",
        }
        for name, measure in measures.items():
            names.append(f"{shards}: {name}")
            line = found[measure]
            points.append(Point(None, 100 * float(line["mean"]), 100 * float(line["std"]), None))
    return dots(names, points, Scale("accuracy on a client's own classes, %"), percent)


def work() -> str:
    """How long clients work between two rounds, 200 steps of a head in all."""
    return by_work("editing-rates", "local steps a round, for the same number in all")


def by_work(study: str, below: str) -> str:
    """FedAvg of a head by local work, a line for each partition."""
    runs = table(f"studies/{study}-runs.csv")
    series = {
        (word if word == "IID" else f"Nc={word}"): [
            point(count, [run for run in runs if run["row"] == f"fedavg/{key}-j{count}"]) for count in ("4", "8", "16")
        ]
        for key, word in PARTITIONS.items()
    }
    return lines(series, below, Scale(ACCURACY))


def steps() -> str:
    """Gradients rescaled, and momenta, under a mask."""
    kinds = {"momentum 0.9": "sparse-{}/nc5", "rescaled up to 10 times": "rescale/{}-10"}
    kinds |= {
        "rescaled up to 3 times": "rescale/{}-3",
        "momentum 0.5": "momentum/{}-m0.5",
        "no momentum": "momentum/{}-m0.0",
    }
    rules = {"largest": "high_magnitude", "least sensitive": "least_sensitive"}
    rows = {f"{name}: {kind}": form.format(rule) for name, rule in rules.items() for kind, form in kinds.items()}
    return named("personalization-steps", rows)


def corrections() -> str:
    kinds = {"none": "none", "FedProx": "fedprox", "SCAFFOLD": "scaffold", "FedNTD": "fedntd"}
    return crossed("corrections", "correction/{1}-{0}", {"a tenth": "sparse", "everything": "dense"}, kinds)


def hostile() -> str:
    attacks = {"nobody": "nobody", "updates times -10": "sign_flip", "wrong labels": "label_flip"}
    rules = {"mean": "mean", "median": "median", "trimmed mean": "trimmed_mean", "multi-Krum": "multi_krum"}
    return crossed("corrections", "hostile/{}-{}", attacks, rules | {"geometric median": "geometric_median"})


def allocation() -> str:
    """Where masks lie, by block."""
    series = defaultdict(list)
    for row in table("allocation.csv"):
        if row["sparsity"] == "0.9":
            series[row["rule"]].append(Point(row["block"].replace("blocks.", ""), float(row["share"])))
    return lines(series, "block", Scale("share that trains, 0.9 frozen"))


def taking() -> str:
    runs = table("studies/beyond-runs.csv")
    shares = ("0.03", "0.1", "0.3", "1.0")
    found = [point(share, [run for run in runs if run["row"] == f"participation/{share}"]) for share in shares]
    return lines({"0.9 frozen, 1 class per client": found}, "share of clients in a round", Scale(ACCURACY))


if __name__ == "__main__":
    for draw in (
        rules,
        start,
        chance,
        first,
        skew,
        cost,
        overlap,
        sums,
        privacy,
        ways,
        five,
        own,
        work,
        epochs,
        six,
        server,
        anew,
        steps,
        corrections,
        hostile,
        taking,
        allocation,
    ):
        target = HERE / "pictures" / f"{draw.__name__}.svg"
        target.parent.mkdir(exist_ok=True)
        target.write_text(draw())
        print(target)
