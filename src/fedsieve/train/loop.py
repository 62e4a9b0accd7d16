"""Training one stage on one machine, and evaluation.

The state of a stage is a value (`StageState`) that can be saved after any step; every draw has an address, so a
stage continued from a saved state repeats exactly what it would have done.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.config import Optimizer, Stage
from fedsieve.errors import Diverged, FedsieveError
from fedsieve.mask.mask import Mask
from fedsieve.randomness import generator
from fedsieve.train.feed import Autocast, Examples
from fedsieve.train.modes import RunningStatistics, changing, own_draws, seed_layers, training
from fedsieve.train.objectives import PLAIN, Recipe, correct, widened
from fedsieve.train.optimizers import SparseAdamW, SparseSGDM
from fedsieve.train.record import Record, merit
from fedsieve.train.replay import COMPILING, TOLD, Replay, Speed, compiled
from fedsieve.train.schedule import learning_rate

EVALUATION_BATCH = 500


@dataclass
class StageState:
    """Where a stage stands. `theta` and `best` are vectors of its ParamSpace."""

    theta: Tensor
    sums: Tensor  # loss and correct answers over the epoch under way, (2,) float64
    optimizer: dict[str, Tensor] = field(default_factory=dict)  # its buffers, one entry per weight that trains
    best: Tensor | None = None  # the chosen epoch's weights; None until an epoch was validated
    statistics: Tensor | None = None  # running ones of the model, where they change
    best_statistics: Tensor | None = None  # and of the chosen epoch
    epoch: int = 0  # whole epochs done
    step: int = 0  # steps done in the epoch under way
    best_at: int | None = None
    chosen: dict[str, float] = field(default_factory=dict)  # metrics of the chosen epoch
    seconds: float = 0.0
    done: bool = False
    mask_id: str = ""  # of a sparse stage
    calibration_seconds: float = 0.0

    @classmethod
    def start(cls, theta: Tensor) -> "StageState":
        return cls(theta, torch.zeros(2, dtype=torch.float64, device=theta.device))

    @property
    def length(self) -> int:
        """Epochs done."""
        return self.epoch

    def numbers(self) -> dict[str, Any]:
        """Everything but the tensors."""
        return {name: getattr(self, name) for name in (item.name for item in fields(self)) if name not in TENSORS}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that `restore` understands."""
        own = {name: getattr(self, name) for name in TENSORS if name != "optimizer"}
        own |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.items()}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    @classmethod
    def restore(cls, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> "StageState":
        """The state that gave these `numbers()` and `tensors()`."""
        # A count of steps, which has no dimension, stays on the host, where the optimizer reads it.
        moved = {name: tensor.to(device) if tensor.dim() else tensor for name, tensor in tensors.items()}
        optimizer = {name.removeprefix("optimizer."): t for name, t in moved.items() if name.startswith("optimizer.")}
        own: dict[str, Any] = {name: t for name, t in moved.items() if not name.startswith("optimizer.")}
        return cls(**own, optimizer=optimizer, **numbers)


TENSORS = ("theta", "sums", "best", "statistics", "best_statistics", "optimizer")


@dataclass(frozen=True)
class Tick:
    """What the loop tells after every step: how far it is, and after an epoch what that epoch gave."""

    step: int
    steps: int
    record: Record | None = None


@dataclass(frozen=True, eq=False)
class CentralTask:
    """One stage where all examples are, and how it is run. `theta` is bound to the weights that train."""

    stage: Stage
    model: nn.Module
    theta: Tensor
    train: Examples
    seed: int
    autocast: Autocast
    mask: Mask | None = None  # the weights that move; None: all
    speed: Speed = "eager"
    say: Callable[[str], None] = lambda _: None
    recipe: Recipe = PLAIN


def train_stage(task: CentralTask, state: StageState, validate: Callable[[], dict[str, float]]) -> Iterator[Tick]:
    """Train until the stage is done, yielding after every step with `state` ready to be saved.

    At the end the model has the weights of the epoch with the best `val_accuracy` of `validate()`, or the lowest `val_loss`
    where accuracy is not measured, or of the last epoch where it gives neither.
    """
    stage, model, theta, train, autocast = task.stage, task.model, task.theta, task.train, task.autocast
    settings, recipe = stage.optimizer, task.recipe
    optimizer = make_optimizer(settings, theta, task.mask)
    with torch.no_grad():
        theta.copy_(state.theta)
    optimizer.state[theta] = state.optimizer  # one dictionary, so the state follows the optimizer
    state.theta = theta.detach()  # a view: the state follows the weights
    running, moving = RunningStatistics(model), changing(model, recipe) in ("federated", "local")
    if state.statistics is not None:
        running.write(state.statistics)

    if task.speed in COMPILING:
        task.say(TOLD)
    inner = compiled(model.__call__, task.speed, model)

    def differentiate(*batch: Tensor) -> Tensor:
        """Fill theta.grad; gives the batch's loss and correct answers, summed."""
        *raw, labels = batch
        theta.grad.zero_()  # type: ignore[union-attr]
        inputs = train.inputs(*raw)
        right = None
        with autocast():
            if recipe.on_outputs:
                # A last, smaller batch is not worth compiling.
                outputs = widened((inner if len(labels) == stage.batch_size else model)(inputs))
                right = correct(outputs.detach(), labels).sum() if recipe.accuracy else None
            else:
                loss = recipe.model_losses(model, inputs, labels).mean()
        if recipe.on_outputs:
            loss = recipe.mean(outputs, labels)
        loss.backward()
        with torch.no_grad():
            total = loss.detach() * len(labels)
            return torch.stack([total, torch.zeros_like(total) if right is None else right])

    def step_in_mode(step: int, *batch: Tensor) -> Tensor:
        """`differentiate` with modules as the recipe trains them; where all examples are, moving statistics are the model's."""
        with training(model, recipe), own_draws(theta.device):
            if recipe.mode == "train":
                seed_layers((task.seed, stage.name), state.epoch, step)
            sums = differentiate(*batch)
            state.statistics = running.read() if moving else None
        if state.statistics is not None:
            running.write(state.statistics)
        return sums

    plain = recipe.mode == "eval" and recipe.statistics == "frozen"
    gradient = Replay(differentiate, on=task.speed != "eager" and plain and recipe.on_outputs, say=task.say)
    assert stage.epochs is not None
    per_epoch = math.ceil(len(train) / stage.batch_size)
    steps, warmup = per_epoch * stage.epochs, round(stage.warmup_epochs * per_epoch)
    while not state.done:
        order = generator(task.seed, "order", stage.name, state.epoch).permutation(len(train))
        draws = train.draw(generator(task.seed, "augment", stage.name, state.epoch))
        clock, seen = time.perf_counter(), 0
        for step in range(state.step, per_epoch):
            examples = order[step * stage.batch_size : (step + 1) * stage.batch_size]
            rate = learning_rate(state.epoch * per_epoch + step, steps, settings.lr, stage.schedule, warmup)
            optimizer.param_groups[0]["lr"] = rate
            batch = train.fetch(examples, draws)
            sums = gradient(*batch) if plain else step_in_mode(step, *batch)
            optimizer.step()
            state.sums += sums  # on the device until the epoch ends, so that no step waits for it
            seen += len(examples)
            state.step = step + 1
            if state.step < per_epoch:
                yield Tick(state.epoch * per_epoch + state.step, steps)
        loss_sum, right = state.sums.tolist()  # waits for the device: the clock below is honest
        seconds = time.perf_counter() - clock
        record = Record(
            stage=stage.name,
            epoch=state.epoch + 1,
            train_loss=loss_sum / len(train),
            train_accuracy=right / len(train) if recipe.training_columns == 3 else None,
            lr=rate,
            images_per_second=seen / seconds,
        )
        if math.isfinite(loss_sum):
            record.note(**validate())
        if not all(math.isfinite(value) for value in record.values() if isinstance(value, float)):
            raise Diverged(
                f'stage "{stage.name}" diverged in epoch {state.epoch + 1}: the loss is not finite. '
                f"Lower stages.{stage.name}.optimizer.lr (now {settings.lr:g}), add warmup_epochs or clip_norm"
            )
        record.seconds = time.perf_counter() - clock
        _end_epoch(stage, state, record)
        if state.done and state.best is not None:
            with torch.no_grad():
                theta.copy_(state.best)
            if state.best_statistics is not None:
                running.write(state.best_statistics)
        yield Tick(steps if state.done else state.epoch * per_epoch, steps, record)


def make_optimizer(settings: Optimizer, theta: Tensor, mask: Mask | None) -> SparseSGDM | SparseAdamW:
    """The optimizer of a stage on its bound vector."""
    shared: dict[str, Any] = {
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        "clip_norm": settings.clip_norm,
        "rescale": settings.rescale,
    }
    if settings.foreign:
        raise FedsieveError(
            f"optimizer: {settings.kind} is a local step of clients; central training takes sgd or adamw"
        )
    if settings.kind == "adamw":
        return SparseAdamW(theta, mask, **settings.fields, **shared)
    return SparseSGDM(theta, mask, momentum=settings.momentum, **settings.fields, **shared)


def _end_epoch(stage: Stage, state: StageState, record: Record) -> None:
    """Move the state past an epoch: keep its weights if it is the best so far, and see whether the stage is over."""
    state.epoch, state.step = state.epoch + 1, 0
    state.sums.zero_()
    state.seconds += record["seconds"]
    found, best = merit(record, "val"), merit(state.chosen, "val")
    validated = found is not None
    if found is None or state.best is None or best is None or found > best:
        state.best_at = state.epoch
        state.chosen = record.starting_with("val_")
        if validated:
            state.best, state.best_statistics = state.theta.clone(), state.statistics
    assert state.best_at is not None
    waited = state.epoch - state.best_at
    state.done = state.epoch == stage.epochs or (stage.early_stopping is not None and waited >= stage.early_stopping)


@torch.no_grad()
def predict(forward: Callable[[Any], Tensor], feed: Examples, autocast: Autocast) -> Tensor:
    """The outputs of every example, such as logits (N, classes), float32, in order."""
    parts = []
    for inputs, _ in feed.in_order(EVALUATION_BATCH):
        with autocast():
            parts.append(forward(inputs).float())
    return torch.cat(parts)


def measure(outputs: Tensor, labels: Tensor, prefix: str, recipe: Recipe = PLAIN) -> dict[str, float]:
    """Mean loss, accuracy and further metrics, named `{prefix}_{name}`."""
    values = recipe.values(outputs, labels)
    found = {"loss": recipe.mean(recipe.exact(outputs), labels)} | {
        name: value.double().mean() for name, value in values.items()
    }
    return {f"{prefix}_{name}": value.item() for name, value in found.items()}


def evaluate(
    model: nn.Module, feed: Examples, autocast: Autocast, recipe: Recipe = PLAIN, prefix: str = "val"
) -> dict[str, float]:
    """What a recipe measures of a model on all examples, named `{prefix}_{name}`; nothing where there are none."""
    if not len(feed):
        return {}
    if recipe.on_outputs and feed.labels.dim() == 1:  # outputs of tokens are too many to keep
        return measure(predict(model, feed, autocast), feed.labels, prefix, recipe)
    means = measure_each(model, feed, autocast, recipe).mean(0).tolist()
    return {f"{prefix}_{name}": mean for name, mean in zip(recipe.measured, means, strict=True)}


@torch.no_grad()
def measure_each(model: nn.Module, feed: Examples, autocast: Autocast, recipe: Recipe = PLAIN) -> Tensor:
    """What a recipe measures of each example, (N, len(recipe.measured)) float64."""
    parts = []
    for inputs, labels in feed.in_order(EVALUATION_BATCH):
        outputs = None
        with autocast():
            if recipe.on_outputs or len(recipe.measured) > 1:
                outputs = widened(model(inputs))
            losses = None if recipe.on_outputs else recipe.model_losses(model, inputs, labels)
        losses = recipe.losses(recipe.exact(outputs), labels) if losses is None else losses.expand(len(labels))
        values = recipe.values(outputs, labels).values()
        parts.append(torch.stack([losses.double(), *(value.double() for value in values)], 1))
    return torch.cat(parts)
