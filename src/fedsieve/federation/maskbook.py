"""The masks of one federated stage: the one in use, all weights that have moved, and each client's masks and knowledge."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Sieve, Stage
from fedsieve.federation.calibrate import nested_tiers
from fedsieve.federation.channel import Parcel
from fedsieve.federation.state import Context, MaskState
from fedsieve.federation.vectors import Span
from fedsieve.mask.mask import Mask
from fedsieve.mask.overlap import block_of
from fedsieve.model.space import Layout, ParamSpace
from fedsieve.wire.values import Coding


class MaskBook:
    """Keeps the masks of a stage over `space`, whose clients all start from the weights in `theta`."""

    def __init__(
        self,
        context: Context,
        stage: Stage,
        space: ParamSpace,
        theta: Tensor,
        state: MaskState,
        save: Callable[[str, Mask], None] = lambda *_: None,
    ) -> None:
        """`theta` is bound to the model. `save` takes a name without the stage's, and a new mask."""
        self.context, self.stage, self.space, self.theta = context, stage, space, theta
        self.state, self.save, self.base = state, save, theta.detach().clone()
        self.sieve: Sieve | None = context.experiment.mask_of(stage)
        self.per_client = self.sieve is not None and self.sieve.scope == "client"
        self.device = theta.device
        self.sure = dict(state.known)  # what clients elsewhere have shown to know
        self._answered: list[int] = []  # clients with own masks that answered in this round
        self._tiers: dict[float, Mask] = {}
        self.ready = False  # whether the mask of the stage is in use
        self.mask: Mask | None = None  # the weights that train; None: all
        self.support: Tensor | None = None  # their places
        self.moved: Mask | None = None  # all weights that may differ from `base`; None: any
        self.moved_index: Tensor | None = None
        self.spans: list[Span] = []
        if state.mask is not None or self.sieve is None or self.per_client:  # nothing to calibrate first
            self.use(self.restored(state.mask))

    @property
    def trains(self) -> Layout:
        """The weights that train."""
        return self.mask or self.space

    @property
    def count(self) -> int:
        """k, how many weights train."""
        return self.trains.count

    @property
    def travels(self) -> bool:
        """True where the mask is sent to clients. They draw a random mask themselves."""
        return self.sieve is not None and (bool(self.sieve.rule.evidence) or self.per_client)

    def due(self, round: int) -> bool:
        """True where a shared or public mask must be made before a round."""
        if self.sieve is None or self.per_client:
            return False
        if self.state.mask is None:
            return True
        # The first mask is that of round 0, the next that of round `refresh`.
        return self.sieve.refresh is not None and self.state.generation <= round // self.sieve.refresh

    @property
    def bits(self) -> Tensor | None:
        """The bits of the weights that train in this round: of the shared mask, or of all clients' own masks."""
        bits = self.state.moved if self.per_client else self.state.mask
        return None if bits is None else bits.clone()

    def restored(self, bits: Tensor | None) -> Mask | None:
        """The mask with these bits."""
        return None if bits is None else Mask(self.space, bits.numpy())

    # --- change ------------------------------------------------------------------------------------------------------

    def use(self, mask: Mask | None) -> None:
        """Train the weights of `mask` from here on (None: all)."""
        self.mask, self.ready, self._tiers = mask, True, {}
        self.support = None if mask is None else mask.indices().to(self.device)
        moved = mask if self.state.moved is None else self.restored(self.state.moved)
        # One object where they are equal, so that a glance shows whether anything else has moved.
        self._set_moved(mask if mask is not None and moved == mask else moved)
        self.spans = block_spans(self.space, self.support)

    def renew(self, mask: Mask, scores: Tensor) -> None:
        """Take over a new shared mask and its scores (D,). Weights that have moved once stay known."""
        state = self.state
        old = self.restored(state.moved)
        moved = mask if old is None else mask | old
        state.mask, state.moved = bits_of(mask), bits_of(moved)
        state.generation, state.ahead = state.generation + 1, []
        if self.context.population.settings.devices:
            state.ranks = scores[mask.indices()]
        self.use(mask)

    def grow(self) -> None:
        """Note at the end of a round that the own masks of clients that answered may have moved."""
        grown = self.moved
        for client in self._answered:
            grown = self.own(client) if grown is None else grown | self.own(client)
        self._answered.clear()
        if grown is not None and grown != self.moved:
            self.state.moved = bits_of(grown)
            self._set_moved(grown)

    def _set_moved(self, moved: Mask | None) -> None:
        if self.per_client and moved is None:
            moved = Mask.zeros(self.space)
        self.moved = moved
        self.moved_index = None if moved is None else moved.indices().to(self.device)

    # --- weights as they travel --------------------------------------------------------------------------------------

    def taken(self, vector: Tensor) -> Tensor:
        """The values of a vector (D,) that train."""
        return vector if self.support is None else vector.index_select(0, self.support)

    def outgoing(self, theta: Tensor, coding: Coding) -> Tensor:
        """The server's values of the weights that have moved: as they are, or in coarse formats as differences from `base`."""
        values = _at(theta, self.moved_index)
        return (values if absolute(coding) else values - _at(self.base, self.moved_index)).float()

    @torch.no_grad()
    def lay(self, values: Tensor, coding: Coding, theta: Tensor) -> None:
        """Lay the server's weights over `theta`, as a message brought them."""
        values = values.to(theta.dtype)
        if not absolute(coding):
            values = _at(self.base, self.moved_index) + values
        if self.moved_index is None:
            theta.copy_(values)
        else:
            theta.index_copy_(0, self.moved_index, values)

    # --- what each client holds --------------------------------------------------------------------------------------

    def tier(self, client: int) -> Mask | None:
        """The part of the shared mask that a client's device trains; None where it trains all of it."""
        density = self.context.population.device(client).density
        if self.per_client or self.mask is None or density == 1:
            return None
        if not self._tiers:
            assert self.sieve is not None and self.state.ranks is not None
            self._tiers = nested_tiers(self.context, self.sieve, self.mask, self.state.ranks)
        return self._tiers[density]

    def set_tier(self, client: int, mask: Mask) -> None:
        """Take over the part that a client's device trains, as the server named it."""
        self._tiers = {self.context.population.device(client).density: mask}

    def own(self, client: int) -> Mask:
        """The mask that a client calibrated when it first took part."""
        return Mask(self.space, self.context.memory.get(client)[self.own_name].numpy())

    @property
    def own_name(self) -> str:
        """The name of a client's own mask in its memory."""
        return f"{self.stage.name}.mask"

    def keep_own(self, client: int, mask: Mask, round: int) -> None:
        """Remember the mask that a client made for itself."""
        self.context.memory.put(client, round, **{self.own_name: bits_of(mask)})
        self.save(f"client-{client}", mask)

    def hear(self, client: int) -> None:
        """Note that a client with a mask of its own answered, so that the server has its mask."""
        if client not in self.state.given:
            self.state.given.append(client)
        self._answered.append(client)

    def encloses(self, client: int) -> bool:
        """True where a client's update must hold its mask."""
        return self.per_client and client not in self.state.given

    def holds(self, clients: Sequence[int]) -> Tensor | None:
        """Which of the trained weights each client may move, (clients, k); None where all may move all."""
        if self.per_client:
            return torch.stack([self.own(client).to_bool(self.device) for client in clients])
        tiers = [self.tier(client) for client in clients]
        if all(tier is None for tier in tiers):
            return None
        assert self.mask is not None and self.support is not None
        rows = [(self.mask if tier is None else tier).to_bool(self.device)[self.support] for tier in tiers]
        return torch.stack(rows)

    def groups(self, clients: Sequence[int]) -> Iterator[tuple[list[int], Layout, Tensor | None]]:
        """Clients that train the same weights: the layout of these, and their places among the k trained ones."""
        if self.per_client:
            for client in clients:
                mask = self.own(client)
                yield [client], mask, mask.indices().to(self.device)
            return
        tiers = {client: self.tier(client) for client in clients}
        for tier in dict.fromkeys(tiers.values()):
            members = [client for client in clients if tiers[client] is tier]
            if tier is None:
                yield members, self.trains, None
            else:
                assert self.support is not None
                yield members, tier, torch.searchsorted(self.support, tier.indices().to(self.device))

    def segments(self, clients: Sequence[int]) -> Iterator[tuple[np.ndarray, list[int]]]:
        """Places among the k trained weights with the clients that hold them. Places that all hold come first."""
        densities = {client: self.context.population.device(client).density for client in clients}
        before = torch.zeros(self.count, dtype=torch.bool)
        for density in sorted(set(densities.values())):
            holders = [client for client in clients if densities[client] >= density]
            tier = self.tier(next(client for client in clients if densities[client] == density))
            held = torch.ones_like(before)
            if tier is not None and self.mask is not None:
                held = tier.to_bool()[self.mask.indices()]
            yield (held & ~before).nonzero().flatten().numpy(), holders
            before = held

    # --- what each client knows --------------------------------------------------------------------------------------

    def newcomers(self, clients: Sequence[int]) -> list[int]:
        """Clients that have heard nothing in this stage; from here on they have."""
        new = [client for client in clients if str(client) not in self.state.known]
        self.state.known |= dict.fromkeys(map(str, new), 0)
        return new

    def introductions(self, clients: Sequence[int], round: int) -> Iterator[tuple[Parcel, list[int]]]:
        """The masks that clients lack, each with the clients that lack it. Marks them as known from here on."""
        generation = self.state.generation
        if self.per_client and self.moved is not None:
            generation = self.moved.count + 1  # any number that changes when the mask does
        lacking = [client for client in clients if self.state.known[str(client)] != generation]
        if lacking and self.moved is not None and self.travels:
            yield Parcel("mask", round, self.moved, enclose=True), lacking
            if self.mask is not None and self.mask is not self.moved:  # which of all that moved trains now
                yield Parcel("mask", round, self.mask, enclose=True, within=self.moved), lacking
            tiers = {client: self.tier(client) for client in lacking}
            for tier in filter(None, dict.fromkeys(tiers.values())):
                members = [client for client in lacking if tiers[client] is tier]
                yield Parcel("mask", round, tier, enclose=True, within=self.mask), members
        self.state.known |= dict.fromkeys(map(str, clients), generation)

    def terms(self, client: int) -> Mapping[str, Any]:
        """The masks that a question names: those in use, and whether the server has the client's own."""
        masks = {"moved": self.moved, "mask": self.mask, "tier": self.tier(client)}
        named = {name: mask and mask.id for name, mask in masks.items()}
        return {**named, "generation": self.state.generation, "given": client in self.state.given}

    def confirm(self, client: int) -> None:
        """Note that a client elsewhere has answered, so it has received all that was sent."""
        if str(client) in self.state.known:
            self.sure[str(client)] = self.state.known[str(client)]

    def doubt(self, client: int) -> None:
        """Take back what a client was sent since its last sound answer: it may not have received it."""
        name, known = str(client), self.state.known
        if name in self.sure:
            known[name] = self.sure[name]
        else:
            known.pop(name, None)
        self.state.ahead = [other for other in self.state.ahead if other != client]

    def forget(self, client: int) -> None:
        """Note that a client has lost its memory: it knows nothing, and its own mask is gone."""
        self.sure.pop(str(client), None)
        self.state.given = [other for other in self.state.given if other != client]


def absolute(coding: Coding) -> bool:
    """True where a format is exact, so that weights are sent as they are and not as differences."""
    return coding.format in ("fp32", "coo")


def bits_of(mask: Mask) -> Tensor:
    """A copy of a mask's bits, to be kept in a state."""
    return torch.from_numpy(mask.bits.copy())


def _at(vector: Tensor, index: Tensor | None) -> Tensor:
    return vector if index is None else vector.index_select(0, index)


def block_spans(space: ParamSpace, support: Tensor | None) -> list[Span]:
    """Runs of trained weights that lie in one block: its name, and where they begin and end among the k."""
    cuts = list(space.offsets)
    if support is not None:
        cuts = torch.searchsorted(support.cpu(), torch.tensor(space.offsets)).tolist()
    runs = []
    for name, group in groupby(range(len(space.names)), key=lambda index: block_of(space.names[index])):
        members = list(group)
        runs.append((name, cuts[members[0]], cuts[members[-1] + 1]))
    return [run for run in runs if run[1] < run[2]]
