"""Sums of clients' answers to a question: plain, secure, or with noise."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fedsieve.federation.channel import Reply, Tally
from fedsieve.federation.clients import Ask, Clients
from fedsieve.federation.secure import SecureSums
from fedsieve.federation.state import ServerContext
from fedsieve.privacy.dp import Account
from fedsieve.wire.codec import MessageError


class Sums:
    """Sums the answers of the clients of one stage, under the privacy settings."""

    def __init__(self, context: ServerContext, clients: Clients, stage: str, device: torch.device | str) -> None:
        privacy = context.experiment.privacy
        self.clients, self.account, self.device = clients, context.account, device
        self.secure = SecureSums(clients, privacy, Tally(context.ledger, stage), device)
        self.secret = privacy.aggregation == "secagg"

    def __call__(self, ask: Ask, clients: Sequence[int], needed: bool = True) -> tuple[Tensor, int]:
        """The sum of the answers (k,), float64, and of their n.

        Where all answers are `needed`, a refused one is raised. With noise every client counts once, and n is their number.
        """
        if self.secret:
            return self.secure.at_64_bits(ask, self.clients.keep(ask, clients, needed))
        replies = self.clients.answers(ask, clients, needed)
        if self.account is not None:
            return noisy_sum(self.account, ask, replies)
        total, seen = torch.zeros(ask.over.count, dtype=torch.float64, device=self.device), 0
        for reply in replies:
            if not isinstance(reply, MessageError):
                total += reply.values.double()
                seen += reply.n
            elif needed:
                raise reply
        return total, seen


def noisy_sum(account: Account, ask: Ask, replies: Iterable[Reply]) -> tuple[Tensor, int]:
    """The sum with noise, and of how many clients it is."""
    settings = account.settings.scores if ask.what == "scores" else account.settings.statistics
    assert settings is not None  # the config sees to it
    values = []

    def accepted() -> Iterator[Tensor]:
        for reply in replies:
            if isinstance(reply, MessageError):
                raise reply
            values.append(reply.client)
            yield reply.values

    return account.total(accepted(), ask.over.count, settings), len(values)
