"""Settings of experiments: typed, strict, read from YAML and `key=value` words. Nothing here imports torch."""

# fmt: off
# isort: off
from fedsieve.config.conflicts import too_many
from fedsieve.config.reading import (
    apply_overrides, load_config, make_experiment, override_place, parse_config, parse_yaml, read_config, to_yaml
)
from fedsieve.config.schema import (
    Aggregator, Allocation, Attack, Correction, Data, Device, Experiment, Failures, Federation, Fisher, Granularity,
    Interpolation, LastBlocks, LayerKind, Local, Lora, Message, Model, Noised, Optimizer, Part, Partition,
    PersonalMethod, Privacy, Ridge, RuleName, Server, Sieve, Stage, Transform
)
from fedsieve.config.strict import Positive, Strict

__all__ = [
    "Aggregator", "Allocation", "Attack", "Correction", "Data", "Device", "Experiment", "Failures", "Federation",
    "Fisher", "Granularity", "Interpolation", "LastBlocks", "LayerKind", "Local", "Lora", "Message", "Model", "Noised",
    "Optimizer", "Part", "Partition", "PersonalMethod", "Positive", "Privacy", "Ridge", "RuleName", "Server", "Sieve",
    "Stage", "Strict", "Transform", "apply_overrides", "load_config", "make_experiment", "override_place",
    "parse_config", "parse_yaml", "read_config", "to_yaml", "too_many",
]
