"""Federated fine-tuning in which only a calibrated, sparse subset of weights moves, and only what moved is sent."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "Experiment",
    "FedsieveError",
    "Mask",
    "ParamSpace",
    "SparseAdamW",
    "SparseSGDM",
    "calibrate",
    "decode",
    "encode",
    "fisher",
    "load_config",
    "maskable",
    "parse_config",
    "resume",
    "run",
]

if TYPE_CHECKING:
    from fedsieve.config import Experiment, load_config, parse_config
    from fedsieve.errors import FedsieveError
    from fedsieve.mask.calibration import calibrate, maskable
    from fedsieve.mask.mask import Mask
    from fedsieve.mask.scores import fisher
    from fedsieve.model.space import ParamSpace
    from fedsieve.runner.run import resume, run
    from fedsieve.train.optimizers import SparseAdamW, SparseSGDM
    from fedsieve.wire.codec import decode, encode

_HOMES = {
    "Experiment": "fedsieve.config",
    "load_config": "fedsieve.config",
    "parse_config": "fedsieve.config",
    "FedsieveError": "fedsieve.errors",
    "Mask": "fedsieve.mask.mask",
    "ParamSpace": "fedsieve.model.space",
    "SparseAdamW": "fedsieve.train.optimizers",
    "SparseSGDM": "fedsieve.train.optimizers",
    "calibrate": "fedsieve.mask.calibration",
    "maskable": "fedsieve.mask.calibration",
    "decode": "fedsieve.wire.codec",
    "encode": "fedsieve.wire.codec",
    "fisher": "fedsieve.mask.scores",
    "resume": "fedsieve.runner.run",
    "run": "fedsieve.runner.run",
}


def __getattr__(name: str) -> Any:
    # On first use: torch takes seconds to import, and the command line must answer a typo at once.
    if name not in _HOMES:
        raise AttributeError(f"module 'fedsieve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
