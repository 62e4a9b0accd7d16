"""How modules behave while they train: layers that draw random numbers, and those that keep running statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedsieve.errors import FedsieveError
from fedsieve.model.calling import Inputs, tensors_of
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator
from fedsieve.train.objectives import Recipe, named


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a module keeps running statistics, as BatchNorm does."""
    return isinstance(getattr(module, "running_mean", None), Tensor)


class RunningStatistics:
    """The running means and variances of a model as one vector."""

    def __init__(self, model: nn.Module) -> None:
        self.buffers = {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in model.named_modules()
            if keeps_statistics(module)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer.is_floating_point()
        }
        self.space = ParamSpace(tuple(self.buffers), tuple(tuple(buffer.shape) for buffer in self.buffers.values()))

    def read(self) -> Tensor:
        """A copy of them."""
        return self.space.flatten(self.buffers)

    @torch.no_grad()
    def write(self, vector: Tensor) -> None:
        """Set them."""
        for name, value in self.space.unflatten(vector).items():
            self.buffers[name].copy_(value)

    @contextmanager
    def set_to(self, vector: Tensor | None) -> Iterator[None]:
        """Set them for a while; None: leave them."""
        before = self.read()
        if vector is not None:
            self.write(vector)
        try:
            yield
        finally:
            self.write(before)


def changing(model: nn.Module, recipe: Recipe) -> str:
    """How the running statistics of a model change in training; "frozen" where it keeps none."""
    return recipe.statistics if any(map(keeps_statistics, model.modules())) else "frozen"


@contextmanager
def training(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Put every module in the mode that the recipe trains it in, and leave modes and buffers as they were."""
    trains, changes = recipe.mode == "train", recipe.statistics != "frozen"
    changing = trains or changes
    wanted = {module: changing and (changes if keeps_statistics(module) else trains) for module in model.modules()}
    others = [module for module, mode in wanted.items() if module.training != mode]
    for module in others:
        module.training = wanted[module]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if changing else []
    try:
        yield
    finally:
        for module in others:
            module.training = not wanted[module]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def batch_of(client: int, count: int) -> Iterator[None]:
    """Say in a sentence that a single example has no batch statistics."""
    try:
        yield
    except ValueError as error:
        if count > 1 or "more than 1 value per channel" not in str(error):
            raise
        raise FedsieveError(
            f"client {client} has a batch of one example, which BatchNorm cannot normalise. Choose a batch size that leaves no "
            "single example, give every client more, or use statistics=frozen"
        ) from error


@contextmanager
def own_draws(device: torch.device) -> Iterator[None]:
    """Leave torch's generators as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


def seed_layers(address: tuple[int | str, ...], *further: int) -> None:
    """Have layers draw at an address, which begins with the seed."""
    seed, *rest = address
    torch.manual_seed(int(generator(int(seed), "layers", *rest, *further).integers(2**63)))


def why_alone(recipe: Recipe, model: nn.Module, inputs: Inputs) -> str:
    """Why clients must train one at a time; empty where nothing of that kind speaks against stacking them."""
    if not recipe.on_outputs:
        return f"the objective {named(recipe.objective)} needs the model"
    if changing(model, recipe) != "frozen":
        return "its running statistics, as of BatchNorm, are not frozen"
    if recipe.mode == "train" and _draws(recipe, model, inputs):
        return "its layers draw random numbers in training, as dropout does"
    return ""


@torch.no_grad()
def _draws(recipe: Recipe, model: nn.Module, inputs: Inputs) -> bool:
    """Whether a forward pass in training takes from torch's generators."""
    device = tensors_of(inputs)[0].device

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    with training(model, recipe), own_draws(device):
        before = states()
        model(inputs)
        return not all(map(torch.equal, before, states()))
