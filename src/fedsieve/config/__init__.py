"""Settings of experiments: typed, strict, read from YAML and `key=value` words. Nothing here imports torch."""

# fmt: off
# isort: off
from fedsieve.config.choice import FAMILIES, Choice, register, words_in
from fedsieve.config.conflicts import too_many
from fedsieve.config.reading import (
    apply_overrides, load_config, make_experiment, override_place, parse_config, parse_yaml, read_config, to_yaml
)
from fedsieve.config.schema import (
    Allocation, Data, Device, Experiment, Failures, Federation, Fisher, Granularity, Interpolation, LastBlocks, LayerKind,
    Local, Lora, Message, Model, Noised, Part, PersonalMethod, Privacy, Ridge, Sieve, Stage, Transform
)
from fedsieve.config.strict import Positive, Strict
from fedsieve.config.words import (
    AdamW, AggregatorChoice, Attack, Correction, ObjectiveChoice, Optimizer, Partition, Rule, SGD,
    Server, TrackerChoice, dropped
)

__all__ = [
    "FAMILIES", "SGD", "AdamW", "AggregatorChoice", "Allocation", "Attack", "Choice", "Correction", "Data",
    "Device", "Experiment", "Failures", "Federation", "Fisher", "Granularity", "Interpolation", "LastBlocks", "LayerKind",
    "Local", "Lora", "Message", "Model", "Noised", "ObjectiveChoice", "Optimizer", "Part", "Partition",
    "PersonalMethod", "Positive", "Privacy", "Ridge", "Rule", "Server", "Sieve", "Stage", "Strict", "TrackerChoice",
    "Transform", "apply_overrides", "dropped", "load_config", "make_experiment", "override_place", "parse_config",
    "parse_yaml", "read_config", "register", "to_yaml", "too_many", "words_in",
]
