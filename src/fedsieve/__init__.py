"""Federated fine-tuning in which only a calibrated, sparse subset of weights moves, and only what moved is sent."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "SGD",
    "AdamW",
    "Aggregator",
    "Coding",
    "Data",
    "Device",
    "Evaluation",
    "Experiment",
    "Failures",
    "Federated",
    "FedsieveError",
    "Fisher",
    "Ledger",
    "Local",
    "Mask",
    "Message",
    "Model",
    "Objective",
    "Optimizer",
    "ParamSpace",
    "Privacy",
    "Record",
    "Server",
    "ServerOptimizer",
    "Shards",
    "Sieve",
    "SparseAdamW",
    "SparseSGDM",
    "calibrate",
    "decode",
    "encode",
    "federate",
    "fisher",
    "jaccard",
    "load_config",
    "maskable",
    "parse_config",
    "partition",
    "register",
    "resume",
    "run",
]

if TYPE_CHECKING:
    from fedsieve.config import (
        SGD,
        AdamW,
        Data,
        Device,
        Experiment,
        Failures,
        Fisher,
        Local,
        Message,
        Model,
        Optimizer,
        Privacy,
        Server,
        Sieve,
        load_config,
        parse_config,
        register,
    )
    from fedsieve.data.partitions import Shards
    from fedsieve.errors import FedsieveError
    from fedsieve.federation.aggregators import Aggregator
    from fedsieve.federation.server_optimizers import ServerOptimizer
    from fedsieve.mask.calibration import calibrate, maskable
    from fedsieve.mask.mask import Mask
    from fedsieve.mask.overlap import jaccard
    from fedsieve.mask.scores import fisher
    from fedsieve.model.space import ParamSpace
    from fedsieve.runner.federate import Evaluation, Federated, federate, partition
    from fedsieve.runner.run import resume, run
    from fedsieve.train.objectives import Objective
    from fedsieve.train.optimizers import SparseAdamW, SparseSGDM
    from fedsieve.train.record import Record
    from fedsieve.wire.codec import Coding, decode, encode
    from fedsieve.wire.ledger import Ledger

_HOMES = {
    "AdamW": "fedsieve.config",
    "Data": "fedsieve.config",
    "Device": "fedsieve.config",
    "Experiment": "fedsieve.config",
    "Failures": "fedsieve.config",
    "Fisher": "fedsieve.config",
    "Local": "fedsieve.config",
    "Message": "fedsieve.config",
    "Model": "fedsieve.config",
    "Optimizer": "fedsieve.config",
    "Privacy": "fedsieve.config",
    "SGD": "fedsieve.config",
    "Server": "fedsieve.config",
    "Sieve": "fedsieve.config",
    "load_config": "fedsieve.config",
    "parse_config": "fedsieve.config",
    "register": "fedsieve.config",
    "FedsieveError": "fedsieve.errors",
    "Shards": "fedsieve.data.partitions",
    "Aggregator": "fedsieve.federation.aggregators",
    "ServerOptimizer": "fedsieve.federation.server_optimizers",
    "calibrate": "fedsieve.mask.calibration",
    "maskable": "fedsieve.mask.calibration",
    "Mask": "fedsieve.mask.mask",
    "jaccard": "fedsieve.mask.overlap",
    "fisher": "fedsieve.mask.scores",
    "ParamSpace": "fedsieve.model.space",
    "Evaluation": "fedsieve.runner.federate",
    "Federated": "fedsieve.runner.federate",
    "federate": "fedsieve.runner.federate",
    "partition": "fedsieve.runner.federate",
    "resume": "fedsieve.runner.run",
    "run": "fedsieve.runner.run",
    "Objective": "fedsieve.train.objectives",
    "SparseAdamW": "fedsieve.train.optimizers",
    "SparseSGDM": "fedsieve.train.optimizers",
    "Record": "fedsieve.train.record",
    "Coding": "fedsieve.wire.codec",
    "decode": "fedsieve.wire.codec",
    "encode": "fedsieve.wire.codec",
    "Ledger": "fedsieve.wire.ledger",
}


def __getattr__(name: str) -> Any:
    # On first use: torch takes seconds to import, and the command line must answer a typo at once.
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsieve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
