"""Mask rules: from evidence on the weights of a model to one score per weight."""

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from fedsieve.config import Rule, Sieve
from fedsieve.errors import FedsieveError
from fedsieve.foreign import called, expect
from fedsieve.mask.calibration import hybrid as combined


class Evidence:
    """What a rule may look at, each a vector (D,), computed when it is first asked for.

    Across clients, `fisher` and `gradient` are means over all scored examples: each costs a sum over clients.
    """

    def __init__(
        self,
        sieve: Sieve,
        active: Tensor,
        weights: Tensor,
        random: Callable[[], Tensor],
        measure: Callable[[str], Tensor],
    ) -> None:
        self.weights = weights
        self.active = active  # bool: the weights that calibration has not frozen yet
        self.alpha, self.scale = sieve.alpha, sieve.scale
        self._random, self._measure = random, measure

    @cached_property
    def fisher(self) -> Tensor:
        """The mean squared gradient of log p(y|x)."""
        return self._measure("fisher")

    @cached_property
    def gradient(self) -> Tensor:
        """The mean gradient of the loss, with its sign."""
        return self._measure("gradient")

    @cached_property
    def random(self) -> Tensor:
        """Uniform numbers, the same in every calibration round."""
        return self._random()


def scores_of(rule: Rule, evidence: Evidence) -> Tensor:
    """The scores (D,) that a rule gives."""
    if rule.home is None:
        raise FedsieveError(f"mask.rule: {rule.kind} needs a finished mask: name one with mask.file")
    if not rule.foreign:
        return rule.made()(evidence)
    where = f"mask.rule: {rule.kind}"
    scores = called(rule.made(), where, evidence)
    expect(scores, evidence.weights.shape, where, "one score for each weight")
    return scores.detach()


def sensitivity(evidence: Evidence) -> Tensor:
    """Fisher scores."""
    return evidence.fisher


def size(evidence: Evidence) -> Tensor:
    """|w|."""
    return evidence.weights.abs()


def hybrid(evidence: Evidence) -> Tensor:
    """Fisher scores and |w| together."""
    return combined(evidence.fisher, evidence.weights.abs(), evidence.active, evidence.alpha, evidence.scale)


def gradient(evidence: Evidence) -> Tensor:
    """|g| (SIFT, Song et al. 2024; GPS, Zhang et al. 2024)."""
    return evidence.gradient.abs()


def saliency(evidence: Evidence) -> Tensor:
    """|g w| (SNIP, Lee et al. 2019; SSFL, Ohib et al. 2024)."""
    return (evidence.gradient * evidence.weights).abs()


def at_random(evidence: Evidence) -> Tensor:
    """Uniform numbers."""
    return evidence.random
