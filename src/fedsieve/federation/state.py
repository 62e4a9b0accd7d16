"""The state that goes into and comes out of each federated round, and the context that all stages share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsieve.config import Experiment
from fedsieve.federation.memory import ClientMemory
from fedsieve.federation.population import Population
from fedsieve.federation.team import Team
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.dp import Account
from fedsieve.train.feed import Autocast, Examples
from fedsieve.train.objectives import PLAIN, Recipe
from fedsieve.train.replay import Speed
from fedsieve.wire.ledger import Ledger

TENSORS = ("theta", "server", "best", "best_mask", "control", "statistics", "best_statistics")
BITS = ("best_mask", "mask", "moved")  # these stay on the host


@dataclass
class MaskState:
    """The masks of a stage, as a checkpoint keeps them."""

    mask: Tensor | None = None  # the bits of the shared mask,
    moved: Tensor | None = None  # and of all weights that may differ from the stage's start
    ranks: Tensor | None = None  # the last scores of the shared mask's weights: smaller devices train the first of them
    generation: int = 0  # masks made so far
    known: dict[str, int] = field(default_factory=dict)  # the newest mask that each client has
    ahead: list[int] = field(default_factory=list)  # clients that have the newest weights already, to measure them
    given: list[int] = field(default_factory=list)  # clients whose own mask the server has
    seconds: float = 0.0  # spent on calibration

    TENSORS = ("mask", "moved", "ranks")

    def numbers(self) -> dict[str, Any]:
        """Everything but the tensors."""
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in self.TENSORS}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there."""
        return {name: value for name in self.TENSORS if (value := getattr(self, name)) is not None}


@dataclass
class ServerState:
    """Where a federated stage stands. Vectors are of the stage's ParamSpace, or of the weights that train in it."""

    theta: Tensor  # the server's weights
    server: dict[str, Tensor] = field(default_factory=dict)  # the server optimizer's buffers
    masks: MaskState = field(default_factory=MaskState)
    best: Tensor | None = None  # the chosen round's weights; None until a round was validated
    best_mask: Tensor | None = None  # and the bits of what trained in it
    control: Tensor | None = None  # SCAFFOLD's c
    statistics: Tensor | None = None  # running ones of the model, where clients send theirs
    best_statistics: Tensor | None = None  # and of the chosen round
    round: int = 0  # rounds done
    blending: bool = False  # whether clients know their shares in a blend
    memory: dict[str, int] = field(default_factory=dict)  # nodes: the valid version of what each remembers
    taken: int = 0  # rounds whose mean moved the weights
    refused: dict[str, int] = field(default_factory=dict)  # replies that did not count, by reason
    drift: float | None = None  # of the last round
    best_at: int | None = None
    best_generation: int = 0
    chosen: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    simulated_seconds: float = 0.0  # that the server would have waited for clients
    clients_at_once: int | None = None
    done: bool = False

    @property
    def length(self) -> int:
        """Rounds done."""
        return self.round

    def numbers(self) -> dict[str, Any]:
        """Everything but the tensors."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name not in TENSORS}
        return own | {"masks": self.masks.numbers()}

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that `restore` understands. Of vectors, only places that may differ from the stage's start."""
        own: dict[str, Tensor | None] = {name: getattr(self, name) for name in TENSORS if name != "server"}
        if self.masks.moved is not None:
            places = _places(self.masks.moved, self.theta)
            for name in ("theta", "best"):
                own[name] = None if (value := own[name]) is None else value.index_select(0, places)
        own |= {f"server.{name}": tensor for name, tensor in self.server.items()}
        own |= {f"masks.{name}": tensor for name, tensor in self.masks.tensors().items()}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def complete(self, base: Tensor) -> None:
        """Lay restored values over the weights that the stage starts from, which makes whole vectors of them."""
        if self.masks.moved is None:
            return
        moved = _places(self.masks.moved, base)
        for name in ("theta", "best"):
            values = getattr(self, name)
            if values is not None and len(values) != len(base):
                setattr(self, name, base.index_copy(0, moved, values))

    @classmethod
    def restore(cls, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> "ServerState":
        """The state that gave these `numbers()` and `tensors()`."""
        own: dict[str, dict[str, Any]] = {"": {}, "server": {}, "masks": {}}
        for name, tensor in tensors.items():
            group, _, last = name.rpartition(".")
            own[group][last] = tensor if last in BITS else tensor.to(device)
        masks = MaskState(**own["masks"], **numbers["masks"])
        return cls(**{**numbers, **own[""], "server": own["server"], "masks": masks})


def _places(bits: Tensor, vector: Tensor) -> Tensor:
    """The places of the set bits, on the device of `vector`."""
    flat = np.unpackbits(bits.numpy(), bitorder="little")
    return torch.from_numpy(np.flatnonzero(flat)).to(vector.device)


@dataclass(frozen=True, eq=False)
class Context:
    """The context of all federated stages, where clients are."""

    experiment: Experiment
    population: Population
    model: nn.Module  # the whole classifier
    initial: Mapping[str, Tensor]  # its weights as every device has them from the beginning
    train: Examples  # images, also where a stage trains on features
    validation: Examples
    autocast: Autocast
    speed: Speed
    executor: str  # of one process: sequential or stacked
    memory: ClientMemory
    say: Callable[[str], None] = lambda _: None
    team: Team | None = None  # the ranks that share the work; None: this process is alone
    recipe: Recipe = PLAIN
    masks: Mapping[str, Mask] = field(default_factory=dict)  # finished ones, by stage

    def changed_weights(self, but: ParamSpace | None = None) -> tuple[Mask, Tensor] | None:
        """The weights that earlier stages changed, `but` for some: a mask, and its values. Every device has the others."""
        whole = ParamSpace.of(self.model)
        now = whole.read(self.model)
        changed = (now != whole.flatten(self.initial).to(now.device)).cpu()
        for name in but.names if but else ():
            whole.view(changed, name).fill_(False)
        if not changed.any():
            return None
        mask = Mask.from_bool(whole, changed)
        return mask, now[mask.indices().to(now.device)]


@dataclass(frozen=True, eq=False, kw_only=True)
class ServerContext(Context):
    """The context of all federated stages, where the server is."""

    ledger: Ledger
    account: Account | None = None  # under differential privacy
