"""Words with settings, where a test gives those of several words together."""

from dataclasses import asdict, dataclass

from fedsieve.config import AggregatorChoice
from fedsieve.federation import aggregators


def word(family, kind, **settings):
    """The word, with those of the settings that it takes; they are not validated."""
    made = family.named(kind)
    return made.model_construct(**{key: value for key, value in settings.items() if key in made.model_fields})


@dataclass(frozen=True)
class Robust:
    """The settings of all robust rules."""

    share: float = 0.2
    f: int = 1
    m: int | None = None
    mix: int | None = None
    limit: float | None = None

    def rule(self, kind):
        """An aggregator with these settings."""
        return word(AggregatorChoice, kind, **asdict(self))


def aggregate(kind, rows, weights, settings=Robust()):
    """What an aggregator makes of updates."""
    return aggregators.aggregate(settings.rule(kind), rows, weights)
