"""What the rounds of a stage work on: the state that goes in and comes out of each, and what all stages share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from fedsieve.config import Experiment
from fedsieve.federation.channel import Channel
from fedsieve.federation.population import Population
from fedsieve.federation.sites import Sites
from fedsieve.federation.store import ClientStore
from fedsieve.federation.team import Team
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.dp import Account
from fedsieve.train.feed import Autocast, Feed
from fedsieve.train.replay import Speed
from fedsieve.wire.ledger import Ledger

TENSORS = ("theta", "server", "best", "best_mask", "mask", "moved", "ranks", "control")


@dataclass
class ServerState:
    """Where a federated stage stands. Vectors are of the stage's ParamSpace, or of the weights that train in it."""

    theta: Tensor  # the server's weights
    server: dict[str, Tensor] = field(default_factory=dict)  # the server optimizer's buffers
    best: Tensor | None = None  # the chosen round's weights; None until a round was validated
    best_mask: Tensor | None = None  # and the bits of what trained in it
    mask: Tensor | None = None  # the bits of the shared mask,
    moved: Tensor | None = None  # and of all weights that may differ from the stage's start
    ranks: Tensor | None = None  # the last scores of the shared mask's weights: smaller devices train the first of them
    control: Tensor | None = None  # SCAFFOLD's c
    round: int = 0  # rounds done
    blending: bool = False  # whether clients know their shares in a blend
    generation: int = 0  # masks made so far
    known: dict[str, int] = field(default_factory=dict)  # the newest mask that each client has
    ahead: list[int] = field(default_factory=list)  # clients that have the newest weights already, to measure them
    given: list[int] = field(default_factory=list)  # clients whose own mask the server has
    memory: dict[str, int] = field(default_factory=dict)  # sites elsewhere: the valid version of what each remembers
    taken: int = 0  # rounds whose mean moved the weights
    refused: dict[str, int] = field(default_factory=dict)  # replies that did not count, by reason
    drift: float | None = None  # of the last round
    best_at: int | None = None
    best_generation: int = 0
    chosen: dict[str, float] = field(default_factory=dict)
    calibration_seconds: float = 0.0
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
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in TENSORS}

    def __post_init__(self) -> None:
        self.places: Tensor | None = None  # the weights of `moved`, by number: only these need saving

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by names that `restore` understands; of vectors, what may differ from the stage's start."""
        own = {name: getattr(self, name) for name in TENSORS if name != "server"}
        own |= {f"server.{name}": tensor for name, tensor in self.server.items()}
        if self.places is not None:
            for name in ("theta", "best"):
                own[name] = None if own[name] is None else own[name].index_select(0, self.places)
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def complete(self, base: Tensor, moved: Tensor | None) -> None:
        """After `restore`: make whole vectors of what was saved, laid over the weights that the stage starts from."""
        for name in ("theta", "best"):
            values = getattr(self, name)
            if values is not None and moved is not None:
                setattr(self, name, base.index_copy(0, moved, values))

    @classmethod
    def restore(cls, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> "ServerState":
        """The state that gave these `numbers()` and `tensors()`."""
        moved = {
            name: tensor if name in ("best_mask", "mask", "moved") else tensor.to(device)
            for name, tensor in tensors.items()
        }
        server = {name.removeprefix("server."): t for name, t in moved.items() if name.startswith("server.")}
        own: dict[str, Any] = {name: t for name, t in moved.items() if not name.startswith("server.")}
        return cls(**own, server=server, **numbers)


@dataclass
class Context:
    """What the stages of a federated experiment share."""

    experiment: Experiment
    population: Population
    model: nn.Module  # the whole classifier
    initial: Mapping[str, Tensor]  # its weights as every device has them from the beginning
    train: Feed  # images, also where a stage trains on features
    validation: Feed
    autocast: Autocast
    speed: Speed
    executor: str  # of one process: sequential or stacked
    ledger: Ledger
    store: ClientStore
    account: Account | None = None  # under differential privacy
    say: Callable[[str], None] = lambda _: None
    keep_mask: Callable[[str, Mask], None] = lambda *_: None  # a name without the stage's, and a new mask
    sites: Sites | None = None  # where clients are elsewhere
    team: Team | None = None  # the ranks that share the work; None: this process is alone

    def channel(self, stage: str, device: torch.device) -> Channel:
        """The wire of one stage."""
        experiment = self.experiment
        return Channel(self.ledger, experiment.seed, stage, device, experiment.privacy, self.account)

    def changed_weights(self, but: ParamSpace | None = None) -> tuple[Mask, Tensor] | None:
        """What earlier stages made of the weights that every device has, `but` for some: a mask, and its values."""
        whole = ParamSpace.of(self.model)
        now = whole.read(self.model)
        changed = (now != whole.flatten(self.initial).to(now.device)).cpu()
        for name in but.names if but else ():
            whole.view(changed, name).fill_(False)
        if not changed.any():
            return None
        mask = Mask.from_bool(whole, changed)
        return mask, now[mask.indices().to(now.device)]
