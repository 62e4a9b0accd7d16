"""Fisher blending: clients mix what they receive with their own last weights, each weight by the client's share in
sum_j F_j of its sensitivity."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fedsieve.config import Sieve
from fedsieve.federation.calibrate import client_scores
from fedsieve.federation.channel import EXACT, Channel, Part
from fedsieve.federation.state import Context
from fedsieve.federation.sums import sum_over_clients
from fedsieve.mask.mask import Mask
from fedsieve.model.space import ParamSpace
from fedsieve.randomness import generator


def tell_shares(context: Context, channel: Channel, space: ParamSpace, sieve: Sieve, mask: Mask, round: int) -> None:
    """Every client learns its share F_k / sum_j F_j of each weight that trains, and remembers it."""
    people, seed, stage = context.population, context.experiment.seed, channel.stage
    clients = people.trainer(np.arange(people.trainers)).tolist()

    def parts() -> Iterator[Part]:
        asked = []
        for client in clients:
            rows = generator(seed, "blend rows", stage, client).permutation(people.examples(client))
            asked.append((rows[: sieve.fisher.samples], (stage, "blend", client)))
        parts = client_scores(context, space, sieve, mask, 0, asked)
        for client, (part, count) in zip(clients, parts, strict=True):
            own = (part / count).float()
            context.store.put(client, round, **{f"{stage}.share": own})
            yield client, own, count

    total, _ = sum_over_clients(channel, "scores", round, mask, parts())
    total = channel.down("scores", clients, round, mask, total.float(), EXACT).values.double()
    for client in clients:
        own = context.store.get(client, channel.device)[f"{stage}.share"].double()
        share = torch.where(total > 0, own / total.clamp(min=1e-300), 0.0)
        context.store.put(client, round, **{f"{stage}.share": share.half()})


def blended(context: Context, received: Tensor, client: int, stage: str) -> Tensor:
    """Received weights mixed with the client's own last ones by its shares; as received where it has none."""
    memory = context.store.get(client, received.device)
    own, share = (memory.get(f"{stage}.{name}") for name in ("own", "share"))
    if own is None or share is None:
        return received
    share = share.to(received.dtype)
    return share * own.to(received.dtype) + (1 - share) * received
