"""A federated run on its page: who held what, how it converged, drift, bytes, clients' accuracies and masks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedsieve.config import Privacy
from fedsieve.mask.mask import Mask
from fedsieve.mask.overlap import expected_jaccard, jaccard
from fedsieve.privacy.secagg import PHASES
from fedsieve.report.figures import (
    BLUE,
    GREEN,
    INK,
    LABELLED_CLASSES,
    ORANGE,
    PANEL,
    RED,
    by_index,
    column,
    drawn,
    log_scale,
    number_below,
    panel,
    short,
    tint,
)
from fedsieve.report.folder import ClientTable, RunFolder, StageMasks, evenly
from fedsieve.report.html import figure, tick
from fedsieve.report.masks import WIDE, block_labels, comparison
from fedsieve.report.summary import ClientSpread, Spread
from fedsieve.report.traffic import Traffic, of_dense, read_traffic, so_far

SHOWN_CLIENTS = 200  # rows, or columns, of the class-by-client picture
NUMBERED_CLIENTS = 40  # more than this stand in the order of their classes, without numbers
DOTS = 300  # more clients than this are a histogram
COLUMNS = 200  # of a heat map over rounds; more are joined
STEADY = 10  # evaluated rounds over which the spread at the end is taken
REASONS = {
    "unavailable": "the client could not be reached",
    "crash": "the client got the model and never answered",
    "late": "the reply came after the deadline",
    "too few replies": "the round had too few good replies to count",
    "not finite": "the reply held values that are not finite",
    "aborted": "too few clients stayed for a secure sum: it was given up, and nothing of it was revealed",
    "pads remain": "another client did not answer, so that the pads did not cancel",
}
DAMAGED = "the reply was damaged on its way"


class Reached(NamedTuple):
    """When an accuracy was first reached."""

    accuracy: float
    share: float | None  # of the best accuracy, where the level is one
    round: int | None  # of the stage, from 1
    stage: str
    seconds: float
    bytes: int | None


class Change(NamedTuple):
    """A new shared mask beside the one before."""

    round: int  # of the stage, from 1: the first that it was used in
    active: int
    entered: int
    left: int
    jaccard: float
    chance: float
    first: float  # Jaccard with the stage's first mask


@dataclass
class FederationView:
    """What the page says of a federated run. Sections that a run has nothing for are None or empty."""

    traffic: list[Traffic] = field(default_factory=list)
    of_dense: float | None = None
    drawings: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    holdings: dict[str, Any] | None = None
    served: dict[str, Any] | None = None
    drift: dict[str, Any] | None = None
    reached: list[Reached] = field(default_factory=list)
    measure: str = "validation"  # the accuracy that `reached` and `steady` are of
    steady: tuple[int, float, float] | None = None  # evaluated rounds at the end, mean and deviation of their accuracy
    trust: dict[str, Any] | None = None
    refused: list[tuple[str, str, int, float]] = field(default_factory=list)  # reason, meaning, replies, share
    overlaps: list[dict[str, Any]] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)
    personal: Mapping[str, ClientSpread] = field(default_factory=dict)

    def draw(self, name: str, svg: str, label: str) -> None:
        self.drawings[name], self.labels[name] = svg, label

    @cached_property
    def figures(self) -> dict[str, Markup]:
        return {name: figure(svg, self.labels[name]) for name, svg in self.drawings.items()}

    @property
    def bytes(self) -> int:
        return sum(part.total for part in self.traffic)

    @property
    def closed_form(self) -> bool:
        return any(kind.what == "statistics" for part in self.traffic for kind in part.kinds)

    @property
    def counted(self) -> bool:
        return all(part.counted for part in self.traffic)


def describe_federation(run: RunFolder, masks: Mapping[str, StageMasks]) -> FederationView | None:
    """Everything the page says of a federated run; None of a central one."""
    if run.experiment.federation is None:
        return None
    view = FederationView(traffic=read_traffic(run, masks))
    view.of_dense = of_dense(view.traffic)
    _traffic(run, view)
    _convergence(run, view)
    _drift(run, view)
    _refusals(run, view)
    _trust(run, view)
    if run.clients is not None:
        _holdings(run, run.clients, view)
        _served(run, run.clients, view)
    for stage, own in masks.items():
        if len(own.clients) > 1:
            _overlap(run, stage, own, view)
        if len(own.shared) > 1:
            _changes(run, stage, own, view)
    if run.summary and run.summary.personal:
        one = run.summary.client_accuracy
        # The run's own "global" is over the clients that have personal models.
        view.personal = ({"global": one} if one else {}) | run.summary.personal
    return view


# --- bytes -----------------------------------------------------------------------------------------------------------


def _traffic(run: RunFolder, view: FederationView) -> None:
    index = {(str(row.get("stage")), row.get("round")): row["index"] for row in run.records}
    cohorts = {(str(row.get("stage")), row.get("round")): row.get("cohort") for row in run.records}
    rows = []
    for part in view.traffic:
        for place, number in enumerate(part.rounds.tolist()):
            key = (part.stage, number)
            if key not in index:
                continue  # a round that was under way when the run was stopped
            cohort = cohorts[key] or int(max(part.sent_down[place], part.sent_up[place]))
            rows.append(
                {
                    "index": index[key],
                    "stage": part.stage,
                    "round": number,
                    "up": int(part.up[place]),
                    "down": int(part.down[place]),
                    "dense": None if part.dense is None else part.dense * cohort,
                    "dense both": None if part.dense is None else 2 * part.dense * cohort,
                    "limit_up": float(part.limit_up[place]),
                    "limit_down": float(part.limit_down[place]),
                }
            )
    rows.sort(key=lambda row: row["index"])
    if rows:
        view.draw("bytes", bytes_by_round(rows), "bytes sent by round, up and down")
        view.draw("bytes-total", bytes_so_far(rows), "bytes sent so far by round")


@drawn
def bytes_by_round(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Bytes of each round up and down, with their limits, and those of a round of dense fp32 one way."""
    figure, axes = panel(rows)
    for stage in _stages(rows):
        x = column(stage, "index")
        # A step as wide as a round, so that a stage of one round is seen too.
        edges = np.append(x - 0.5, x[-1] + 0.5)
        style: dict[str, Any] = {"marker": "o" if len(x) <= 5 else None, "ms": 3}
        axes.plot(x, _positive(column(stage, "up")), color=BLUE, label="up", **style)
        axes.plot(x, _positive(column(stage, "down")), color=GREEN, label="down", **style)
        for name, colour, label in (("limit_up", BLUE, "limit up"), ("limit_down", GREEN, "limit down")):
            axes.stairs(_positive(column(stage, name)), edges, baseline=None, color=colour, lw=1.1, ls=":", label=label)
        axes.stairs(
            column(stage, "dense"), edges, baseline=None, color=ORANGE, lw=1.4, ls="--", label="dense fp32, one way"
        )
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=3)
    log_scale(axes, tick)
    axes.set_ylabel("bytes in a round")
    return figure


@drawn
def bytes_so_far(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Bytes up, down and of dense fp32 both ways, added up over the rounds."""
    figure, axes = panel(rows)
    x = column(rows, "index")
    lines = (
        ("up", "up", BLUE, "-"),
        ("down", "down", GREEN, "-"),
        ("dense both", "dense fp32, both ways", ORANGE, "--"),
    )
    for name, label, colour, dash in lines:
        sums = np.cumsum(column(rows, name))
        axes.plot(x, _positive(sums), color=colour, ls=dash, label=label, marker="o" if len(x) <= 5 else None, ms=3)
    figure.legend(loc="outside upper left", ncols=3)
    log_scale(axes, tick)
    axes.set_ylabel("bytes so far")
    return figure


def _positive(values: np.ndarray) -> np.ndarray:
    """NaN for what a log scale cannot show."""
    return np.where(values > 0, values, np.nan)


def _stages(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    return [list(stage) for _, stage in groupby(rows, lambda row: row.get("stage"))]


# --- convergence -----------------------------------------------------------------------------------------------------


def _convergence(run: RunFolder, view: FederationView) -> None:
    """When round accuracies, and shares of the best, were first reached; how much the last rounds differ."""
    measures = {"val_accuracy": "validation", "client_val_accuracy": "clients' validation", "test_accuracy": "test"}
    name = next((name for name in measures if any(name in row for row in run.records)), "val_accuracy")
    view.measure = measures[name]
    accuracy, seconds = column(run.records, name), np.nancumsum(column(run.records, "seconds"))
    evaluated = np.flatnonzero(np.isfinite(accuracy))
    if not len(evaluated):
        return
    sent = so_far(run.records, view.traffic)
    for level, share in levels(accuracy[evaluated]):
        place = next(int(place) for place in evaluated if accuracy[place] >= level)
        row = run.records[place]
        amount = int(sent[place]) if view.traffic else None
        view.reached.append(Reached(level, share, row.get("round"), str(row.get("stage")), seconds[place], amount))
    last = [place for place in evaluated if run.records[place].get("stage") == run.records[-1].get("stage")][-STEADY:]
    if len(last) > 1:
        view.steady = (len(last), float(accuracy[last].mean()), float(accuracy[last].std()))


def levels(accuracy: np.ndarray) -> list[tuple[float, float | None]]:
    """Accuracies worth a row: round ones from the last that the first evaluation had, and 90, 95, 99 and 100 % of the best."""
    best = float(accuracy.max())
    tens = [number / 10 for number in range(1, 10) if number / 10 <= best]
    at_once = [level for level in tens if level <= accuracy[0]]
    tens = at_once[-1:] + [level for level in tens if level > accuracy[0]]
    shares = [(share * best, share) for share in (0.9, 0.95, 0.99, 1.0) if best]
    return sorted([*((level, None) for level in tens), *shares], key=lambda row: row[0])


# --- drift -----------------------------------------------------------------------------------------------------------


def _drift(run: RunFolder, view: FederationView) -> None:
    rows = [row for row in run.records if isinstance(row.get("drift"), (int, float))]
    if not rows:
        return
    view.drift = {"last": float(rows[-1]["drift"]), "most": max(float(row["drift"]) for row in rows), "strongest": None}
    view.draw("drift", by_index(rows, "drift", "drift", height=PANEL[1]), "drift by round")
    parted = [row for row in rows if isinstance(row.get("drift_by_block"), dict)]
    blocks = list(dict.fromkeys(block for row in parted for block in row["drift_by_block"]))
    if len(blocks) > 1:
        values = np.array([column([row["drift_by_block"] for row in parted], block) for block in blocks])
        view.drift["strongest"] = float(np.nanmax(values))
        view.draw("drift-blocks", drift_map(values, blocks, parted), "drift by round and block")


@drawn
def drift_map(values: np.ndarray, blocks: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Drift (blocks, rounds): the farther clients went, the stronger. Neighbouring rounds are joined where there are many."""
    step = -(-len(rows) // COLUMNS)
    parts = [np.nan_to_num(values[:, start : start + step]).mean(1) for start in range(0, len(rows), step)]
    cells = np.stack(parts, axis=1)
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    extent = (rows[0]["index"] - 0.5, rows[-1]["index"] + 0.5, len(blocks) - 0.5, -0.5)
    axes.imshow(tint(BLUE, cells / max(np.nanmax(values), 1e-30)), interpolation="none", aspect="auto", extent=extent)
    labels = block_labels(blocks)
    apart = -(-len(blocks) // 26)
    axes.set_yticks(range(0, len(blocks), apart), labels[::apart], color=INK)
    number_below(axes, rows)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.set_ylabel("block")
    return figure


# --- trust -----------------------------------------------------------------------------------------------------------


def _trust(run: RunFolder, view: FederationView) -> None:
    """What the server learnt of single clients, and what hostile ones could do."""
    privacy, settings = run.experiment.privacy, run.experiment.federation
    assert settings is not None
    rows = [row for row in run.records if isinstance(row.get("epsilon"), (int, float))]
    if privacy == Privacy() and settings.aggregator.kind == "mean" and settings.attack is None:
        return
    phases: dict[tuple[str, str], dict[str, int]] = {}  # bytes by what was summed and phase, up and down
    for kind in (kind for part in view.traffic for kind in part.kinds):
        what, _, phase = kind.what.rpartition(".")
        if phase in PHASES:
            phases.setdefault((what, phase), {"up": 0, "down": 0})[kind.direction] += kind.bytes
    if rows:
        view.draw("epsilon", by_index(rows, "epsilon", "epsilon spent", height=PANEL[1]), "epsilon spent by round")
    view.trust = {
        "privacy": privacy,
        "aggregator": settings.aggregator.kind,
        "attack": settings.attack,
        "hostile": run.summary.privacy.get("hostile") if run.summary else None,
        "epsilon": rows[-1]["epsilon"] if rows else None,
        "phases": [(what, phase, sums["up"], sums["down"]) for (what, phase), sums in phases.items()],
        "aborted": sum(isinstance(row.get("refused"), dict) and "aborted" in row["refused"] for row in run.records),
    }


# --- clients ---------------------------------------------------------------------------------------------------------


class Holdings(NamedTuple):
    """A table of clients by classes, small enough for a picture."""

    shown: np.ndarray  # (n,) clients
    images: np.ndarray  # (n, c)
    together: int  # neighbouring classes that share a column


def holdings(clients: ClientTable, classes: int) -> Holdings:
    """Who holds how many images of which class: all clients, or some of them, evenly spread by number.

    Many clients stand in the order of the class that they hold most of.
    """
    shown = np.array(evenly(len(clients.sizes), SHOWN_CLIENTS))
    together = -(-classes // SHOWN_CLIENTS)
    images = np.zeros((len(shown), -(-classes // together)), dtype=np.int64)
    place = np.minimum(np.searchsorted(shown, clients.client), len(shown) - 1)
    known = shown[place] == clients.client
    np.add.at(images, (place[known], clients.label[known] // together), clients.examples[known])
    if len(shown) > NUMBERED_CLIENTS:
        order = np.lexsort((-images.max(1), images.argmax(1)))
        shown, images = shown[order], images[order]
    return Holdings(shown, images, together)


def _holdings(run: RunFolder, clients: ClientTable, view: FederationView) -> None:
    names = run.predictions.class_names if run.predictions else []
    classes = max(len(names), int(clients.label.max(initial=-1)) + 1)
    if not classes:
        return
    table = holdings(clients, classes)
    svg = class_map(table, names, clients.sizes[table.shown], clients.strange[table.shown])
    view.draw("clients", svg, "images of each class that each client holds")
    held = np.bincount(clients.client, minlength=len(clients.sizes))
    view.holdings = {
        "clients": len(clients.sizes),
        "strangers": len(clients.strangers),
        "images": _three(clients.sizes),
        "classes": _three(held),
        "all_classes": classes,
        "shown": len(table.shown),
        "together": table.together,
        "ordered": len(table.shown) > NUMBERED_CLIENTS,
    }


def _three(values: np.ndarray) -> tuple[int, float, int]:
    return int(values.min()), float(np.median(values)), int(values.max())


@drawn
def class_map(table: Holdings, names: Sequence[str], sizes: np.ndarray, strange: np.ndarray) -> Figure:
    """Images by client (row) and class (column), strangers in orange, and beside them how many images each client has."""
    rows, columns = table.images.shape
    figure = Figure(figsize=(WIDE, float(np.clip(0.9 + 0.21 * rows, 2.2, 6.4))), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(4, 1), sharey=True)
    strength = np.sqrt(table.images / max(table.images.max(), 1))
    cells = tint(BLUE, strength)
    cells[strange] = tint(ORANGE, strength)[strange]
    left.imshow(cells, interpolation="none", aspect="auto")
    if rows <= 25 and columns <= 20:
        for (row, place), count in np.ndenumerate(table.images):
            if count:
                ink = "white" if strength[row, place] > 0.75 else INK
                left.text(place, row, f"{count}", ha="center", va="center_baseline", color=ink, fontsize=7)
    named = 0 < columns <= LABELLED_CLASSES and table.together == 1 and len(names) == columns
    step = 1 if columns <= LABELLED_CLASSES else -(-columns // 20)
    labels = [short(name, 12) for name in names] if named else [str(table.together * place) for place in range(columns)]
    turned: dict[str, Any] = {"rotation": 90} if max(map(len, labels)) > 6 or (columns > 12 and named) else {}
    left.set_xticks(range(0, columns, step), labels[::step], **turned)
    if rows <= NUMBERED_CLIENTS:
        left.set_yticks(range(rows), [str(client) for client in table.shown], fontsize=7 if rows > 25 else 8)
    else:
        left.set_yticks([])
    left.set(xlabel="class", ylabel="client")
    right.barh(range(rows), sizes, color=[ORANGE if other else BLUE for other in strange], height=0.8, alpha=0.85)
    right.set_ylim(rows - 0.5, -0.5)
    right.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    right.set_xlabel("images")
    for axes in (left, right):
        axes.tick_params(axis="y", length=0, labelleft=axes is left)
        axes.spines[:].set_visible(False)
    left.tick_params(axis="x", length=0)
    left.grid(False)
    right.grid(axis="y", visible=False)
    return figure


def _served(run: RunFolder, clients: ClientTable, view: FederationView) -> None:
    known = np.isfinite(clients.accuracy)
    if not known.any():
        return
    told = run.summary.client_accuracy if run.summary else None
    accuracy, strange = 100 * clients.accuracy[known], clients.strange[known]
    draw = sorted_clients if len(accuracy) <= DOTS else spread_clients
    view.draw("client-accuracy", draw(accuracy, strange, told or Spread()), "test accuracy of each client")
    sizes = clients.sizes[known]
    if sizes.max() > 1.5 * sizes.min():
        view.draw("client-sizes", accuracy_by_size(accuracy, sizes, strange), "test accuracy of clients by their size")
    view.served = {"told": told, "unknown": int((~known).sum())}


def _levels(told: Spread) -> list[tuple[str, float, str, str]]:
    """What is marked in a picture of clients' accuracies: label, per cent, colour, dash."""
    wanted = (
        ("mean", told.mean, INK, "--"),
        ("worst decile", told.worst_decile, RED, "--"),
        ("worst", told.worst, RED, ":"),
    )
    return [
        (f"{name} {100 * value:.1f}", 100 * value, colour, dash)
        for name, value, colour, dash in wanted
        if value is not None
    ]


@drawn
def sorted_clients(accuracy: np.ndarray, strange: np.ndarray, told: Spread) -> Figure:
    """Clients from the worst to the best (n,), strangers in another colour; the mean and the worst of those who trained."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    order = np.argsort(accuracy, kind="stable")
    x = np.arange(1, len(order) + 1)
    own, others = ~strange[order], strange[order]
    worst = own & (np.cumsum(own) <= max(1, round(0.1 * own.sum())))
    dots = 5.0 if len(order) <= 60 else 3.0
    for label, chosen, colour in (
        ("client", own & ~worst, BLUE),
        ("worst decile", worst, RED),
        ("stranger", others, ORANGE),
    ):
        if chosen.any():
            axes.plot(x[chosen], accuracy[order][chosen], "o", ms=dots, color=colour, label=label)
    for label, value, colour, dash in _levels(told):
        axes.axhline(value, color=colour, lw=1.1, ls=dash, label=label, zorder=1)
    figure.legend(loc="outside upper left", ncols=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="clients, worst first", ylabel="test accuracy, %")
    return figure


@drawn
def spread_clients(accuracy: np.ndarray, strange: np.ndarray, told: Spread) -> Figure:
    """How clients' accuracies (n,) are spread, strangers in another colour."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    parts = [("clients", accuracy[~strange], BLUE), ("strangers", accuracy[strange], ORANGE)]
    shown = [part for part in parts if len(part[1])]
    labels, values, colours = ([part[place] for part in shown] for place in range(3))
    axes.hist(values, bins=30, stacked=True, color=colours, label=labels, alpha=0.85, rwidth=0.92)
    for label, value, colour, dash in _levels(told):
        axes.axvline(value, color=colour, lw=1.3, ls=dash, label=label)
    figure.legend(loc="outside upper left", ncols=3)
    axes.grid(axis="x", visible=False)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="test accuracy, %", ylabel="clients")
    return figure


@drawn
def accuracy_by_size(accuracy: np.ndarray, sizes: np.ndarray, strange: np.ndarray) -> Figure:
    """A dot for every client: its images, and its accuracy."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    many = len(sizes) > DOTS
    for label, chosen, colour in (("client", ~strange, BLUE), ("stranger", strange, ORANGE)):
        if chosen.any():
            dots: dict[str, Any] = {
                "ms": 3.0 if many else 5.0,
                "alpha": 0.5 if many else 0.8,
                "rasterized": len(sizes) > 2000,
            }
            axes.plot(sizes[chosen], accuracy[chosen], "o", color=colour, label=label, mew=0, **dots)
    if strange.any():
        figure.legend(loc="outside upper left", ncols=2)
    if sizes.max() > 20 * max(sizes.min(), 1):
        log_scale(axes, way="x")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="images of the client", ylabel="test accuracy, %")
    return figure


def _refusals(run: RunFolder, view: FederationView) -> None:
    counts: Counter[str] = Counter()
    for row in run.records:
        if isinstance(refused := row.get("refused"), dict):
            counts.update(refused)
    trained = {stage.name for stage in run.experiment.stages if stage.method != "ridge"}
    asked = sum(int(row.get("cohort") or 0) for row in run.records if row.get("stage") in trained)
    view.refused = [
        (reason, REASONS.get(reason, DAMAGED), count, count / max(asked, 1)) for reason, count in counts.most_common()
    ]


# --- masks -----------------------------------------------------------------------------------------------------------


def _rule(run: RunFolder, stage: str) -> str:
    """How the stage's rule scores weights."""
    sieve = next((run.experiment.mask_of(one) for one in run.experiment.stages if one.name == stage), None)
    return sieve.rule.basis if sieve else ""


def _overlap(run: RunFolder, stage: str, own: StageMasks, view: FederationView) -> None:
    """How far clients' own masks agree."""
    masks = {str(client): mask for client, mask in own.clients.items()}
    equal = len({mask.id for mask in masks.values()}) == 1
    found: dict[str, Any] = {"stage": stage, "masks": len(own.sizes), "shown": len(masks), "equal": equal}
    found |= {"rule": _rule(run, stage), "density": float(np.mean([mask.density for mask in masks.values()]))}
    found["together"] = run.summary.stages[stage].active if run.summary and stage in run.summary.stages else None
    if not equal:
        compared = comparison(masks)
        found |= {name: compared[name] for name in ("jaccard", "range", "chance", "allocated", "pairs")}
        for name in ("by block", "pairs", "held"):
            if name in compared["drawings"]:
                key = f"overlap-{stage}-{name.replace(' ', '-')}"
                view.draw(key, compared["drawings"][name], f"overlap of clients' masks: {name}")
    view.overlaps.append(found)


def mask_changes(masks: Mapping[int, Mask]) -> list[Change]:
    """Each shared mask beside the one before it, and beside the first."""
    first = masks[min(masks)]
    changes = []
    for before, number in pairwise(sorted(masks)):
        old, new = masks[before], masks[number]
        chance = expected_jaccard(old.density, new.density)
        entered, left = (new - old).count, (old - new).count
        changes.append(Change(number, new.count, entered, left, jaccard(old, new), chance, jaccard(first, new)))
    return changes


def _changes(run: RunFolder, stage: str, own: StageMasks, view: FederationView) -> None:
    changes = mask_changes(own.shared)
    view.draw(f"masks-{stage}", change_curve(changes), f"how much the mask of {stage} changed")
    view.changes.append({"stage": stage, "rows": changes, "rule": _rule(run, stage)})


@drawn
def change_curve(changes: Sequence[Change]) -> Figure:
    """Jaccard indices of each new mask with the one before and with the first, and by chance."""
    figure = Figure(figsize=PANEL, layout="constrained")
    axes = figure.add_subplot()
    x = [change.round for change in changes]
    marker = "o" if len(x) <= 30 else None
    axes.plot(x, [change.jaccard for change in changes], color=BLUE, marker=marker, ms=3.5, label="with the one before")
    axes.plot(x, [change.first for change in changes], color=GREEN, marker=marker, ms=3.5, label="with the first")
    axes.plot(x, [change.chance for change in changes], color=ORANGE, ls="--", lw=1.4, label="by chance")
    figure.legend(loc="outside upper left", ncols=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.02)
    axes.set(xlabel="round of the stage", ylabel="Jaccard index")
    return figure
