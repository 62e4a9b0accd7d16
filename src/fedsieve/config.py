"""What an experiment is: one strict, typed YAML with `key=value` overrides.

Everything that can be known to be wrong without touching a weight or an image is refused here, with the file, the
key, the allowed values and, where a word is near one, a guess at what was meant.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from fedsieve.errors import FedsieveError, did_you_mean

Transform = Literal["resize", "flip", "crop_flip", "flip_rotate"]
Normalize = Literal["data", "imagenet", "half"]
Interpolation = Literal["bilinear", "bicubic"]
Part = Literal["head", "backbone", "all", "lora", "adapter"]
TrackerName = Literal["tensorboard", "wandb", "mlflow"]
RuleName = Literal[
    "least_sensitive", "most_sensitive", "low_magnitude", "high_magnitude", "low_hybrid", "high_hybrid", "random"
]
Granularity = Literal["weight", "row", "attention_head", "block"]
Allocation = Literal["global", "tensor", "block"]
LayerKind = Literal["linear", "attention", "norm", "conv", "bias", "other"]
Scope = Literal["shared", "client", "public"]
ValueFormat = Literal["fp32", "bf16", "fp16", "int8", "int4", "sign", "coo"]
PersonalMethod = Literal["local", "head", "norms", "mask", "blend"]
AggregatorKind = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_bound"]
AttackKind = Literal["label_flip", "sign_flip", "gaussian_noise", "nan", "stale_replay"]
Aggregation = Literal["plain", "zero_sum", "secagg"]

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]  # more, and sizes of arrays overflow
Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
NoiseMultiplier = Annotated[float, Field(ge=0.05)]  # less hides nothing, and cannot be accounted for


class Strict(BaseModel):
    """No unknown keys, no silent conversions, no change after validation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _given(model: BaseModel, *names: str) -> list[str]:
    """Those of some keys that are not at their default: a config that is written out in full has all of them."""
    return [name for name in names if getattr(model, name) != type(model).model_fields[name].default]


def _only_with(model: BaseModel, choice: str, takes: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse keys that the model's `choice` does not take; `takes` says which word of it takes what."""
    word = getattr(model, choice)
    every = {name for names in takes.values() for name in names}
    for name in _given(model, *sorted(every - set(takes.get(word, ())))):
        users = [user for user, names in takes.items() if name in names]
        raise ValueError(f"{name} goes with {choice}: {' or '.join(users)}, and {choice} is {word}")


class Data(Strict):
    """Which images, how they are split and how they reach the model."""

    source: str = Field(
        "uoft-cs/cifar100",
        description="hub id, folder of parquet files or class folders, or digits; of a server whose clients are sites: what it "
        "holds to validate and test on, or none",
    )
    subset: str | None = Field(None, description="configuration name of a hub dataset that has several")
    revision: str | None = Field(None, description="hub revision: branch, tag or commit")
    image_column: str | None = Field(None, description="found by itself when there is only one")
    label_column: str | None = Field(None, description="found by itself when there is only one")
    train_split: str = "train"
    test_split: str | None = Field(None, description='default: "test" where the source has it, held out otherwise')
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="held out by a draw that ignores the seed, only where the source has no test split"
    )
    classes: list[int] | None = Field(None, description="keep only these classes, numbered as in the source")
    class_names: Annotated[list[str], Field(min_length=2)] | None = Field(
        None,
        description="the label map, where a source may lack some classes; default: the classes of the source, sorted",
    )
    size: Annotated[int, Field(ge=4, le=2048)] = 224
    transform: Transform = "resize"
    interpolation: Interpolation = "bicubic"
    normalize: Normalize = "imagenet"
    crop_scale: tuple[float, float] = Field((0.5, 1.0), description="area of a random crop, as shares of the image")
    rotation: Annotated[float, Field(ge=0, le=180)] = Field(15.0, description="largest angle of flip_rotate, degrees")
    val_fraction: Fraction = Field(0.1, description="0 trains on everything and selects nothing")
    stratified: bool = Field(True, description="the validation split keeps the class shares")
    placement: Literal["auto", "device", "mapped"] = Field(
        "auto", description="images on the device, or memory-mapped from disk and fed in batches"
    )
    cache: str | None = Field(
        None, description="folder of decoded images; default $FEDSIEVE_CACHE or ~/.cache/fedsieve"
    )

    @field_validator("crop_scale", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @model_validator(mode="after")
    def _check(self) -> "Data":
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_scale must be two shares with 0 < low <= high <= 1, got [{low}, {high}]")
        if self.classes is not None and (len(set(self.classes)) != len(self.classes) or len(self.classes) < 2):
            raise ValueError("classes must name at least two different classes")
        if self.test_split == self.train_split:
            raise ValueError("test_split and train_split are the same: the test images would be trained on")
        if self.classes is not None and min(self.classes) < 0:
            raise ValueError("classes are numbered from 0")
        if self.class_names is not None and len(set(self.class_names)) != len(self.class_names):
            raise ValueError("class_names: one is named twice")
        if self.source == "none" and self.class_names is None:
            raise ValueError("source: none knows no classes: name them in class_names")
        return self


class Lora(Strict):
    """Low-rank updates beside linear layers (Hu et al. 2022): W x + alpha / rank * B A x, with B = 0 at first.

    Before B has moved, A has no gradient: its Fisher scores are zero.
    """

    rank: Positive = 8
    alpha: Rate = 16.0
    targets: Annotated[list[str], Field(min_length=1)] = Field(
        ["attn.qkv", "attn.proj"], description="linear layers, by the end of their names"
    )


class Bottleneck(Strict):
    """A small layer behind every block's MLP (Houlsby et al. 2019): x + up(gelu(down(x))), with up = 0 at first.

    Before up has moved, down has no gradient: its Fisher scores are zero.
    """

    width: Positive = 32


class Model(Strict):
    """Which pretrained network, and what classifies on top of it."""

    backbone: str = Field("vit_small_patch16_224.dino", description="any timm classifier: `fedsieve list models`")
    weights: str = Field(
        "hub", description="hub, none, digits (made in seconds from the embedded data), a file, or a run folder"
    )
    head: Literal["linear", "mlp"] = "linear"
    hidden: Positive = Field(512, description="width of the mlp head")
    options: dict[str, Any] = Field({}, description="passed to timm.create_model, e.g. {depth: 4, embed_dim: 64}")
    lora: Lora | None = Field(None, description="needs fedsieve[lora]; trained by stages that say train: lora")
    adapter: Bottleneck | None = Field(None, description="trained by stages that say train: adapter")

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if run_together := next((key for key in options if ":" in key), None):
            raise ValueError(f"{run_together}: a colon needs a space after it, as in {{depth: 4}}")
        return options


class Optimizer(Strict):
    """SGD with momentum, or AdamW; of a sparse stage, on the weights of its mask alone."""

    kind: Literal["sgd", "adamw"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.01
    momentum: Fraction = 0.9
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    beta2: Fraction = Field(0.999, description="adamw's second momentum; `momentum` is its first")
    nesterov: bool = False
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(None, description="largest L2 norm of a gradient")
    rescale: Annotated[float, Field(ge=1)] | None = Field(
        None, description="bring a masked gradient to the norm of the whole one, multiplying it by this at most"
    )


class Fisher(Strict):
    """How sensitivity is measured."""

    samples: Positive = Field(1024, description="training images that are scored, drawn by the seed")
    per: Literal["sample", "batch"] = Field(
        "sample", description="batch squares a batch's mean gradient: cheaper, biased low"
    )
    batch_size: Positive = Field(64, description="for per: batch")
    labels: bool = Field(False, description="score with the data's labels instead of labels drawn from the model")
    target: Literal["log_prob", "logit"] = Field("log_prob", description="what is differentiated")


class Sieve(Strict):
    """Which weights may train."""

    rule: RuleName = "least_sensitive"
    sparsity: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="the share of maskable weights that is frozen"
    )
    calibration_rounds: Annotated[int, Field(ge=1, le=1000)] = 1
    schedule: Literal["exponential", "linear"] = Field("exponential", description="the density over calibration rounds")
    granularity: Granularity = "weight"
    allocation: Allocation = Field("global", description="one threshold, or the same density in each tensor or block")
    kinds: Annotated[
        Annotated[Literal["default", "all"], Tag("#one")] | Annotated[list[LayerKind], Tag("#several")],
        Discriminator(lambda value: "#several" if isinstance(value, list) else "#one"),
    ] = Field("default", description="layer kinds that take part; all adds tokens and position embeddings")
    min_active_per_tensor: Annotated[int, Field(ge=0)] = 1
    shrink: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="frozen weights are multiplied by it while scoring, after the first calibration round"
    )
    alpha: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="the share of sensitivity in hybrid rules")
    scale: Literal["ranks", "max"] = Field("ranks", description="how hybrid rules make two scores comparable")
    fisher: Fisher = Fisher()
    scope: Scope = Field(
        "shared",
        description="in a federation: one mask from all clients' summed scores, each client its own, or one scored by the "
        "server on images it holds (validation where there is some, training otherwise)",
    )
    clients: Positive | None = Field(
        None, description="in a federation, shared: how many clients score; default: as many as a round has"
    )
    refresh: Positive | None = Field(None, description="in a federation: calibrate again after so many rounds")
    start_sparsity: Fraction | None = Field(
        None, description="with refresh: the first mask's sparsity, moving evenly to `sparsity` with each new mask"
    )

    @property
    def scored(self) -> bool:
        """Whether its rule looks at images, not at weights alone."""
        return self.rule.endswith(("sensitive", "hybrid"))

    @field_validator("kinds", mode="before")
    @classmethod
    def _list_of_kinds(cls, kinds: Any) -> Any:
        if isinstance(kinds, list) and not kinds:
            raise ValueError("an empty list leaves no weight to train. Name kinds, or leave it out for the default")
        return [kinds] if isinstance(kinds, str) and kinds in get_args(LayerKind) else kinds


class LastBlocks(Strict):
    """Train the last n blocks, what follows them, and the head."""

    last_blocks: Positive


TrainedPart = Annotated[
    Annotated[Part, Tag("#part")] | Annotated[LastBlocks, Tag("#blocks")],
    Discriminator(lambda value: "#blocks" if isinstance(value, (Mapping, LastBlocks)) else "#part"),
]


class Local(Strict):
    """What a client does in one round: passes over its images, or single steps."""

    epochs: Positive | None = Field(None, description="default 1 where no steps are given")
    steps: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> "Local":
        if self.epochs and self.steps:
            raise ValueError("local work is counted in epochs or in steps, not both")
        return self


class Ridge(Strict):
    """A head in closed form: (G + strength n I) W = B, then logits scaled by a temperature."""

    strength: Rate | None = Field(None, description="per image; default: the best of a grid on validation, or 1e-3")
    temperature: Rate | None = Field(None, description="default: fitted on validation, or on nothing at 1")


class Stage(Strict):
    """One phase of an experiment: what trains, and for how long."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=60)]
    train: Annotated[
        Annotated[TrainedPart, Tag("#one")] | Annotated[list[TrainedPart], Field(min_length=1), Tag("#several")],
        Discriminator(lambda value: "#several" if isinstance(value, list) else "#one"),
    ] = Field(
        "all",
        description="a part, or a list of parts; backbone and all (backbone and head) are the network's own weights, "
        "without lora and adapter",
    )
    epochs: Positive | None = Field(None, description="passes over the data, where training is central")
    rounds: Positive | None = Field(None, description="communication rounds, in a federation")
    local: Local = Local()
    budget: Positive | None = Field(
        None, description="in a federation, instead of rounds: local epochs (or steps) times rounds"
    )
    method: Literal["sgd", "ridge"] = Field("sgd", description="ridge: a closed-form head, in one round")
    ridge: Ridge = Ridge()
    batch_size: Positive = 128
    optimizer: Optimizer = Optimizer()
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: Annotated[float, Field(ge=0)] = 0.0
    warmup_rounds: Annotated[int, Field(ge=0)] = Field(0, description="in a federation")
    early_stopping: Positive | None = Field(None, description="stop after so many epochs without a better one")
    sparse: bool = Field(False, description="only the weights of a calibrated mask train")
    mask: Sieve | None = Field(
        None,
        description="this stage's own mask; what it leaves open is as in the mask at the top. Makes the stage sparse",
    )

    @field_validator("train")
    @classmethod
    def _one_part(cls, train: Any) -> Any:
        return train[0] if isinstance(train, list) and len(train) == 1 else train

    @property
    def parts(self) -> list[Part | LastBlocks]:
        """What trains, always as a list."""
        return self.train if isinstance(self.train, list) else [self.train]

    @property
    def length(self) -> int:
        """How many epochs, or rounds in a federation, it has unless it stops early."""
        per_round = self.local.steps or self.local.epochs or 1
        return self.epochs or self.rounds or max(1, round((self.budget or 1) / per_round))

    @property
    def spent(self) -> str | None:
        """What a budget comes to in whole rounds, in words; None where none is given."""
        if self.budget is None:
            return None
        unit, each = ("steps", self.local.steps) if self.local.steps else ("epochs", self.local.epochs or 1)
        return f"a budget of {self.budget:,} local {unit} at {each} a round is {self.length:,} rounds, {self.length * each:,} {unit}"

    @model_validator(mode="after")
    def _check(self) -> "Stage":
        if self.epochs is not None and self.warmup_epochs > self.epochs:
            raise ValueError(f"warmup_epochs ({self.warmup_epochs:g}) is longer than the stage ({self.epochs} epochs)")
        if self.rounds and self.budget:
            raise ValueError("rounds and budget both say how long the stage is: give one")
        if (self.rounds or self.budget) and self.warmup_rounds > self.length:
            raise ValueError(f"warmup_rounds ({self.warmup_rounds}) is longer than the stage ({self.length} rounds)")
        stepwise = ("local", "batch_size", "optimizer", "schedule", "warmup_epochs", "warmup_rounds", "early_stopping")
        if self.method == "ridge" and (ignored := _given(self, *stepwise)):
            raise ValueError(f"{ignored[0]} goes with method: sgd; ridge solves for the head at once")
        if self.method == "sgd" and _given(self, "ridge"):
            raise ValueError("ridge goes with method: ridge, and method is sgd")
        if self.method == "ridge" and self.train != "head":
            raise ValueError("method: ridge solves for a head: it goes with train: head")
        if self.method == "ridge" and (self.sparse or self.mask):
            raise ValueError("method: ridge solves for the whole head: it takes no mask")
        if self.optimizer.nesterov and self.optimizer.momentum == 0:
            raise ValueError("optimizer.nesterov needs optimizer.momentum above 0")
        if self.optimizer.nesterov and self.optimizer.kind == "adamw":
            raise ValueError("optimizer.nesterov goes with kind: sgd")
        return self


class Partition(Strict):
    """Which client holds which training images."""

    kind: Literal["iid", "classes", "dirichlet", "quantity", "natural", "sites"] = Field(
        "iid", description="sites: each client is elsewhere, with data of its own, as `fedsieve flower` has it"
    )
    nc: Positive | None = Field(None, description="classes: how many each client holds; dirichlet: at most so many")
    alpha: Rate | None = Field(None, description="dirichlet, quantity: the smaller, the more skewed")
    min_size: Positive = Field(1, description="dirichlet, quantity: images every client has at least")
    column: str | None = Field(None, description="natural: the column that names the client, such as a user id")

    @model_validator(mode="after")
    def _check(self) -> "Partition":
        skewed = ("alpha", "min_size")
        takes = {"iid": (), "sites": (), "classes": ("nc",), "dirichlet": (*skewed, "nc"), "quantity": skewed}
        mine = takes.get(self.kind, ("column",))
        if mine and getattr(self, mine[0]) is None:
            raise ValueError(f"kind: {self.kind} needs {mine[0]}")
        for name in _given(self, "nc", "alpha", "min_size", "column"):
            if name not in mine:
                raise ValueError(f"kind: {self.kind} takes no {name}")
        return self


class Server(Strict):
    """How the server moves by the clients' mean update (Reddi et al. 2021)."""

    optimizer: Literal["sgd", "momentum", "adam", "yogi", "adagrad"] = Field(
        "sgd", description="sgd with lr 1 is FedAvg, momentum is FedAvgM"
    )
    lr: Rate = 1.0
    momentum: Fraction = Field(0.9, description="of momentum; the first momentum of adam, yogi and adagrad")
    beta2: Fraction = Field(0.99, description="of adam and yogi")
    tau: Rate = Field(1e-3, description="of adam, yogi and adagrad: what is added to the root")
    schedule: Literal["cosine", "constant"] = Field("constant", description="of the server's rate over rounds")
    momentum_correction: Literal["keep", "scale", "reset"] = Field(
        "keep",
        description="with mask.refresh, what becomes of the momentum of weights that stay in the mask: all, the share of the "
        "new mask that was in the old one, or nothing; weights new to it begin without",
    )

    @model_validator(mode="after")
    def _check(self) -> "Server":
        adaptive = ("momentum", "beta2", "tau", "momentum_correction")
        takes = {"momentum": ("momentum", "momentum_correction"), "adam": adaptive, "yogi": adaptive}
        _only_with(self, "optimizer", takes | {"adagrad": ("momentum", "tau", "momentum_correction")})
        return self


class Correction(Strict):
    """What clients add to their loss or gradient against drift."""

    kind: Literal["none", "fedprox", "scaffold", "fedntd"] = "none"
    mu: Annotated[float, Field(ge=0)] = Field(0.01, description="fedprox: weight of the distance to the global model")
    beta: Annotated[float, Field(ge=0)] = Field(1.0, description="fedntd: weight of the distillation")
    tau: Rate = Field(1.0, description="fedntd: its temperature")

    @model_validator(mode="after")
    def _check(self) -> "Correction":
        _only_with(self, "kind", {"fedprox": ("mu",), "fedntd": ("beta", "tau")})
        return self


class Failures(Strict):
    """A simulated trace of what goes wrong, drawn by the seed."""

    unavailable: Fraction = Field(0.0, description="chosen clients that cannot be reached: nothing is sent to them")
    crash: Fraction = Field(0.0, description="clients that got the model and never answer")
    corrupt: Fraction = Field(0.0, description="replies damaged on the way")
    deadline: Rate | None = Field(None, description="simulated seconds; later replies are refused")


class Device(Strict):
    """A kind of client device. Clients are dealt to the kinds by their shares."""

    share: Share = 1.0
    density: Share = Field(1.0, description="of the shared mask: smaller budgets train nested tiers of it")
    work: Share = Field(1.0, description="of the local steps")
    delay: Annotated[float, Field(ge=0)] = Field(0.0, description="mean simulated seconds until it answers")


class Personal(Strict):
    """Models of single clients, made from the global one at the end, each tested as its client sees the world."""

    methods: Annotated[list[PersonalMethod], Field(min_length=1)] = Field(
        ["local"],
        description="local: train what the last stage trained, under its mask; head; norms; mask: under a mask of the "
        "client's own; blend: the client's last weights mixed in, without training",
    )
    clients: Positive | None = Field(None, description="how many, drawn by the seed; default: all")
    local: Local = Local()
    batch_size: Positive = 50
    optimizer: Optimizer = Optimizer()
    as_trained: bool = Field(
        False, description="local, mask: with the optimizer of the stage that trained these weights, and its rate"
    )

    @model_validator(mode="after")
    def _check(self) -> "Personal":
        if len(set(self.methods)) != len(self.methods):
            raise ValueError("methods: one is named twice")
        if self.as_trained and not {"local", "mask"} & set(self.methods):
            raise ValueError("as_trained goes with the methods local and mask: the others have no stage to train as")
        return self


class Kinded(Strict):
    """Settings of which the kind alone may be given."""

    @model_validator(mode="before")
    @classmethod
    def _kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class Aggregator(Kinded):
    """How updates become one. All but the mean bear some hostile clients, and count every client once."""

    kind: AggregatorKind = "mean"
    share: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.2, description="trimmed_mean: of the clients, left out at either end of each value"
    )
    f: Annotated[int, Field(ge=0)] = Field(
        1, description="krum, multi_krum: how many clients of a round may be hostile"
    )
    m: Positive | None = Field(None, description="multi_krum: how many updates are averaged; default: all but f")
    limit: Rate | None = Field(None, description="norm_bound: the largest norm; default: the median of a round's")
    mix: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="all but mean: how many clients of a round may be hostile. Every update first becomes the mean of its nearest "
        "ones, all but so many: for clients that hold different data",
    )

    @model_validator(mode="after")
    def _check(self) -> "Aggregator":
        takes = {"median": (), "trimmed_mean": ("share",), "krum": ("f",), "multi_krum": ("f", "m")}
        takes |= {"geometric_median": (), "norm_bound": ("limit",)}
        _only_with(self, "kind", {kind: (*names, "mix") for kind, names in takes.items()})
        return self


class Attack(Kinded):
    """Simulated hostile clients: the same ones for the whole experiment, drawn by the seed."""

    kind: AttackKind = "sign_flip"
    fraction: Fraction = Field(0.2, description="of all clients")
    factor: Rate = Field(
        10.0,
        description="sign_flip: how many times as long the update is the other way; gaussian_noise: the noise's norm, by it",
    )

    @model_validator(mode="after")
    def _check(self) -> "Attack":
        _only_with(self, "kind", {"sign_flip": ("factor",), "gaussian_noise": ("factor",)})
        return self


class Federation(Strict):
    """Clients that keep their data, and a server that averages what they learnt."""

    clients: Positive | None = Field(None, description="default 100; a natural partition brings its own number")
    partition: Partition = Partition()
    cohort: int | float = Field(0.1, description="clients per round: a share, or a number")
    sampling: Literal["independent", "shuffled"] = Field(
        "independent", description="each round's cohort drawn anew, or every client once before any comes twice"
    )
    weighting: Literal["examples", "uniform"] = "examples"
    divide_by: Literal["holders", "all"] = Field(
        "holders", description="where clients train different weights: by the weight of those who hold one, or of all"
    )
    aggregator: Aggregator = Field(Aggregator(), description="a kind, or a kind with its settings")
    attack: Attack | None = Field(None, description="a kind, or a kind with its settings; default: nobody is hostile")
    server: Server = Server()
    correction: Correction = Correction()
    minimum_replies: Positive = Field(1, description="good replies without which a round changes nothing")
    failures: Failures = Failures()
    devices: list[Device] = Field([], description="uneven devices; default: all alike")
    held_out: Fraction = Field(0.0, description="clients that never train, for testing on strangers")
    evaluate_every: Positive = Field(1, description="rounds from one evaluation to the next")
    client_validation: Fraction = Field(
        0.0, description="of each client's images: never trained on, the next round's clients measure the model on them"
    )
    blend: bool = Field(False, description="Fisher blending: clients mix what they receive with their own last weights")
    personal: Personal | None = None

    @field_validator("cohort", mode="before")
    @classmethod
    def _share_or_number(cls, cohort: Any) -> Any:
        whole = isinstance(cohort, int) and not isinstance(cohort, bool) and cohort >= 1
        if whole or (isinstance(cohort, float) and 0 < cohort <= 1):
            return cohort
        raise ValueError(
            f"a whole number of clients, 1 or more, or a share above 0 and up to 1.0 (0.1: a tenth), got {cohort!r}"
        )

    @model_validator(mode="after")
    def _check(self) -> "Federation":
        if self.clients is None and self.partition.kind == "sites":
            raise ValueError("clients: say how many sites there are")
        if self.clients is not None and self.partition.kind == "natural":
            raise ValueError("a natural partition brings its own number of clients: drop clients")
        if self.devices and abs(sum(device.share for device in self.devices) - 1) > 1e-6:
            raise ValueError("devices: their shares must add up to 1")
        if self.failures.deadline is not None and not any(device.delay for device in self.devices):
            raise ValueError(
                "failures.deadline is for devices that take their time, and none does: give devices a delay, such as "
                "devices: [{delay: 10}]"
            )
        return self

    def strangers(self, clients: int) -> int:
        """How many of so many clients never train."""
        return round(self.held_out * clients)

    def cohort_size(self, trainers: int) -> int:
        """How many clients a round has, of so many that train."""
        return self.cohort if isinstance(self.cohort, int) else max(1, round(self.cohort * trainers))


class Message(Strict):
    """How values travel: to the server, and from it."""

    up: ValueFormat = "fp32"
    down: ValueFormat = "fp32"
    group: Annotated[int, Field(ge=8, le=65535)] = Field(64, description="int8, int4, sign: values that share a scale")
    top_k: Share | None = Field(None, description="send only this share of an update, the largest values")
    error_feedback: bool = Field(False, description="clients keep what rounding took and add it to their next update")

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.down == "sign":
            raise ValueError("down: sign keeps no weights, only directions; it goes with up")
        if self.top_k is not None and self.up == "coo":
            raise ValueError("up: coo is kept as the reports count it; top_k goes with the other formats")
        if _given(self, "group") and not {self.up, self.down} & {"int8", "int4", "sign"}:
            raise ValueError("group goes with int8, int4 and sign, and neither up nor down is one of them")
        return self


class Noised(Strict):
    """A sum that is given out with noise: each client's part is first shortened to a norm."""

    clip_norm: Rate
    noise_multiplier: NoiseMultiplier = Field(description="the noise's deviation, by clip_norm")


class DP(Strict):
    """Client-level differential privacy with a trusted server (McMahan et al. 2018)."""

    epsilon: Rate | None = Field(None, description="that the whole experiment may spend; the noise follows from it")
    noise_multiplier: NoiseMultiplier | None = Field(
        None, description="instead of epsilon: the noise's deviation, by clip_norm"
    )
    delta: Annotated[float, Field(ge=1e-12, lt=1)] = Field(
        1e-5, description="far below one in the number of clients; not below what can be accounted for"
    )
    clip_norm: Rate = Field(description="the largest L2 norm of an update")
    scores: Noised | None = Field(None, description="of a mask from clients' scores, which the budget then pays for")
    statistics: Noised | None = Field(None, description="of a ridge head, which the budget then pays for")

    @model_validator(mode="after")
    def _check(self) -> "DP":
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("dp needs either epsilon, from which the noise follows, or noise_multiplier, not both")
        return self


class Privacy(Strict):
    """What the server learns of single clients: docs/trust.md says what each mode promises."""

    aggregation: Aggregation = Field(
        "plain", description="secagg: only sums (Bonawitz et al. 2017); zero_sum: the secure report's pads, to compare"
    )
    threshold: Annotated[float, Field(gt=0.5, le=1)] = Field(
        0.66, description="secagg: the share of the clients asked without whom there is no sum; more than half"
    )
    bits: Literal[16, 32, 64] = Field(32, description="secagg: of a value of an update; other sums have 64")
    bound: Rate = Field(
        1.0, description="secagg: the largest value of an update; larger ones are clipped, with a warning"
    )
    pad_scale: Rate = Field(1.0, description="zero_sum: the deviation of the pads")
    pad_offset: Annotated[int, Field(ge=0)] = Field(
        0, description="zero_sum: a pad's seed is the client's number plus it"
    )
    dp: DP | None = None

    @model_validator(mode="after")
    def _check(self) -> "Privacy":
        takes = {"secagg": ("threshold", "bits", "bound"), "zero_sum": ("pad_scale", "pad_offset")}
        _only_with(self, "aggregation", takes)
        return self


class Checkpoints(Strict):
    """How often the state is saved, and how many savings are kept."""

    every_seconds: Annotated[float, Field(ge=0)] = 60.0
    keep: Annotated[int, Field(ge=2)] = Field(2, description="two at least: the newest may be damaged")


class Experiment(Strict):
    """One validated experiment. Running it gives one run folder."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)] = "experiment"
    seed: Annotated[int, Field(ge=0)] = 0
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 autocast on a GPU of compute capability 8 or later, otherwise fp32"
    )
    deterministic: bool = Field(False, description="bit-identical repeats on a GPU too, at some cost in speed")
    threads: Positive | None = Field(
        None, description="CPU threads; small networks are fastest, and repeat anywhere, on 1"
    )
    test: bool = Field(
        True, description="open the test set at the end; false while settings are chosen, as in a sweep's trials"
    )
    test_curve: bool = Field(False, description="also test after every epoch; nothing is ever selected on it")
    data: Data = Data()
    model: Model = Model()
    mask: Sieve | None = Field(None, description="the mask of every sparse stage that has none of its own")
    federation: Federation | None = Field(None, description="absent: training is central")
    message: Message = Message()
    privacy: Privacy = Privacy()
    executor: Literal["auto", "sequential", "stacked", "distributed"] = Field(
        "auto",
        description="how a cohort trains; auto: stacked on a GPU, sequential on a CPU; distributed: so on every process that "
        "torchrun starts, and stacked wherever clients_at_once is given",
    )
    clients_at_once: Positive | None = Field(None, description="stacked: default, as many as fit in memory")
    compile: Literal["auto", "eager", "graph", "blocks", "full"] = Field(
        "auto",
        description="graph: steps as CUDA graphs; full: torch.compile too, the fastest once it is ready; blocks: each kind of block "
        "compiled once, sooner ready; eager: none of these. auto: eager on a CPU; on a GPU graph, and full for long runs",
    )
    stages: Annotated[list[Stage], Field(min_length=1)]
    tracking: list[TrackerName] = ["tensorboard"]
    checkpoint: Checkpoints = Checkpoints()

    @model_validator(mode="before")
    @classmethod
    def _complete_masks(cls, tree: Any) -> Any:
        """What a stage's mask leaves open is taken from the mask at the top."""
        if not isinstance(tree, Mapping) or not isinstance(tree.get("mask"), Mapping):
            return tree
        stages = tree.get("stages")
        if not isinstance(stages, list):
            return tree
        top = tree["mask"]
        return {**tree, "stages": [_completed(stage, top) for stage in stages]}

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"{device!r} is not allowed. Allowed: auto, cpu, cuda, cuda:N")
        return device

    @model_validator(mode="after")
    def _check(self) -> "Experiment":
        names = [stage.name for stage in self.stages]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f'stages: two are named "{name}"; every stage needs its own name')
        if self.test_curve and not self.test:
            raise ValueError("test_curve tests after every epoch, but test is false. Drop one of them")
        for stage in self.stages:
            held = self.data.val_fraction or (self.federation and self.federation.client_validation)
            if stage.early_stopping and not held:
                raise ValueError(
                    f"stages.{stage.name}.early_stopping needs validation data, but data.val_fraction is 0. "
                    "Set a fraction or drop early_stopping"
                )
            if stage.sparse and not (stage.mask or self.mask):
                raise ValueError(f"stages.{stage.name}.sparse needs a mask: give one at the top or on the stage")
        if self.mask and not any(stage.sparse or stage.mask for stage in self.stages):
            raise ValueError("mask is given, but no stage takes it: set sparse: true on a stage")
        for stage in self.stages:
            self._check_length(stage)
        if self.federation is None:
            for name in _given(self, "message", "privacy", "clients_at_once"):
                raise ValueError(f"{name} goes with a federation, and none is given")
            for sieve in filter(None, map(self.mask_of, self.stages)):
                for name in _given(sieve, "scope", "clients", "refresh", "start_sparsity"):
                    raise ValueError(f"mask.{name} goes with a federation, and none is given")
            if self.executor != "auto":
                raise ValueError(f"executor: {self.executor} runs a cohort of clients, but no federation is given")
        elif self.executor == "sequential" and self.clients_at_once:
            raise ValueError("clients_at_once goes with executor: stacked; sequential trains one client after another")
        self._check_parts()
        if self.federation is not None:
            self._check_federation(self.federation)
        if self.data.source == "none" and not self.own_images:
            raise ValueError(
                "data.source: none is for a server whose clients hold the images: partition: {kind: sites}"
            )
        if self.own_images and self.data.normalize == "data":
            raise ValueError("data.normalize: data would differ from site to site: say imagenet or half")
        if self.data.source == "none" and self.test_curve:
            raise ValueError("test_curve needs images to test on, and data.source is none")
        if self.model.weights == "digits" and self.data.source != "digits":
            raise ValueError('model.weights is "digits", which goes only with data.source: digits')
        return self

    def _check_parts(self) -> None:
        extras: tuple[Part, ...] = ("lora", "adapter")
        for part in extras:
            there = getattr(self.model, part) is not None
            training = [stage.name for stage in self.stages if part in stage.parts]
            if training and not there:
                raise ValueError(
                    f"stages.{training[0]}.train: {part} needs model.{part}, such as model: {{{part}: {{}}}}"
                )
            if there and not training:
                raise ValueError(
                    f"model.{part} is given, but no stage trains it: set train: {part}, or train: [{part}, head], on a stage"
                )

    def _check_length(self, stage: Stage) -> None:
        where, central = f"stages.{stage.name}", self.federation is None
        if stage.method == "ridge":
            if self.model.head != "linear":
                raise ValueError(f"{where}.method: ridge solves for a linear head; model.head is {self.model.head}")
            for name in ("epochs", "rounds", "budget"):
                if getattr(stage, name) is not None:
                    raise ValueError(f"{where}.{name}: a ridge head is solved in one round: drop it")
            return
        if central and _given(stage, "warmup_rounds", "local"):
            key, instead = ("warmup_rounds", "warmup_epochs") if stage.warmup_rounds else ("local", "epochs")
            raise ValueError(f"{where}.{key} goes with a federation, and none is given: say {instead}")
        if not central and stage.warmup_epochs:
            raise ValueError(f"{where}.warmup_epochs: in a federation the rate warms up by rounds: say warmup_rounds")
        if central and stage.epochs is None:
            raise ValueError(f"{where}.epochs: required, but not given")
        if central and (stage.rounds or stage.budget):
            raise ValueError(f"{where}.rounds: training is central (no federation is given): say epochs")
        if not central and stage.epochs is not None:
            raise ValueError(f"{where}.epochs: in a federation a stage has rounds, and local.epochs or local.steps")
        if not central and not (stage.rounds or stage.budget):
            raise ValueError(f"{where}.rounds: required in a federation, but not given")

    def _check_federation(self, federation: Federation) -> None:
        sieves = [sieve for sieve in map(self.mask_of, self.stages) if sieve is not None]
        own = any(sieve.scope == "client" for sieve in sieves)
        if any(device.density < 1 for device in federation.devices) and (own or not sieves):
            raise ValueError("federation.devices: a density below 1 is a part of a shared mask, and there is none")
        uneven = any(device.density < 1 for device in federation.devices)
        if federation.correction.kind == "scaffold" and (own or uneven or any(sieve.refresh for sieve in sieves)):
            raise ValueError("federation.correction: scaffold goes with one mask, the same for all clients and rounds")
        if federation.blend and (own or any(sieve.refresh for sieve in sieves)):
            raise ValueError("federation.blend goes with one shared mask for the whole stage")
        if self.message.error_feedback and any(sieve.refresh for sieve in sieves):
            raise ValueError("message.error_feedback goes with one mask for the whole stage, but mask.refresh is given")
        methods = federation.personal.methods if federation.personal else []
        if "mask" in methods and not sieves:
            raise ValueError(
                "federation.personal.methods: mask makes each client a mask by a stage's settings, and no stage has any. "
                "Give a mask, or drop the method"
            )
        if "blend" in methods and not (federation.blend and self.stages[-1].method == "sgd"):
            raise ValueError(
                "federation.personal.methods: blend mixes in weights that clients keep from the last stage's rounds: it "
                "needs federation.blend: true and a last stage that is not solved by ridge"
            )
        for stage in self.stages:
            if (sieve := self.mask_of(stage)) is not None:
                self._check_sieve(stage, sieve)
        natural = federation.partition.kind == "natural"  # how many clients that has, only the data says
        if not natural and (why := too_many(self, federation.clients or 100)):
            raise ValueError(why)
        for wrong, why in trust_conflicts(self, federation):
            if wrong:
                raise ValueError(why)
        if _given(federation.server, "momentum_correction") and not any(sieve.refresh for sieve in sieves):
            raise ValueError("federation.server.momentum_correction goes with mask.refresh: no mask ever changes")

    def _check_sieve(self, stage: Stage, sieve: Sieve) -> None:
        """In a federation."""
        if sieve.refresh and sieve.scope == "client":
            raise ValueError("mask.refresh goes with a shared or public mask")
        if sieve.refresh and sieve.refresh >= stage.length:
            raise ValueError(
                f"mask.refresh: stage {stage.name} is over after {stage.length} rounds, before {sieve.refresh} have passed "
                "and a new mask is due"
            )
        if sieve.start_sparsity is not None and sieve.refresh is None:
            raise ValueError("mask.start_sparsity needs mask.refresh: the sparsity changes with each new mask")
        if sieve.clients and sieve.scope != "shared":
            raise ValueError(f"mask.clients says how many score a shared mask, and mask.scope is {sieve.scope}")
        if sieve.clients and not sieve.scored:
            raise ValueError(f"mask.clients says how many score, and mask.rule {sieve.rule} needs no scores of theirs")

    @property
    def own_images(self) -> bool:
        """Whether clients are sites with images of their own, and do not share out one source."""
        return self.federation is not None and self.federation.partition.kind == "sites"

    def mask_of(self, stage: Stage) -> Sieve | None:
        """The mask settings of a stage; None where every weight of the stage trains."""
        return stage.mask or (self.mask if stage.sparse else None)


def too_many(experiment: Experiment, clients: int) -> str | None:
    """What asks for more clients than there are, in words; None where nothing does."""
    federation = experiment.federation
    assert federation is not None
    trainers = clients - federation.strangers(clients)
    if not trainers:
        return f"federation.held_out: {federation.held_out:g} of {clients:,} clients leaves none to train"
    cohort, personal = federation.cohort_size(trainers), federation.personal
    sieves = [sieve for sieve in map(experiment.mask_of, experiment.stages) if sieve is not None]
    there = f"there are {clients:,}"
    training = there if trainers == clients else f"{there}, of which {trainers:,} train (federation.held_out)"
    wanted = [
        ("federation.cohort", cohort, trainers, training),
        ("federation.minimum_replies", federation.minimum_replies, cohort, f"a round has {cohort:,}"),
        ("federation.personal.clients", personal.clients if personal else None, clients, there),
        *(("mask.clients", sieve.clients, trainers, training) for sieve in sieves),
    ]
    for key, count, most, why in wanted:
        if count is not None and count > most:
            return f"{key}: {count:,} clients are asked for, but {why}"
    return None


def trust_conflicts(experiment: Experiment, federation: Federation) -> list[tuple[bool, str]]:
    """Settings of privacy, aggregator and attack that cannot go together, and why: docs/trust.md lists them all."""
    privacy, message, dp = experiment.privacy, experiment.message, experiment.privacy.dp
    sieves = [sieve for sieve in map(experiment.mask_of, experiment.stages) if sieve is not None]
    own = any(sieve.scope == "client" for sieve in sieves)
    tiers = any(device.density < 1 for device in federation.devices)
    top = max((device.density for device in federation.devices), default=1.0)
    largest = sum(device.share for device in federation.devices if device.density == top)
    lossy = federation.failures != Failures()
    scaffold = federation.correction.kind == "scaffold"
    kind, robust = federation.aggregator.kind, federation.aggregator.kind != "mean"
    mode, secure = privacy.aggregation, privacy.aggregation != "plain"
    ridge = any(stage.method == "ridge" for stage in experiment.stages)
    held = experiment.data.val_fraction > 0
    scored = [sieve for sieve in sieves if sieve.scored]
    conflicts = [
        (
            robust and secure,
            f"federation.aggregator: {kind} compares single updates, and privacy.aggregation: {mode} lets the server see only "
            "their sum. Choose one of the two",
        ),
        (
            own and secure,
            f"mask.scope: client does not go with privacy.aggregation: {mode}: a weight that one client alone trains would be "
            "given away by the sum. Use scope: shared or public",
        ),
        (
            tiers and mode == "zero_sum",
            "federation.devices: with zero_sum all clients send the same weights, but some have a density below 1",
        ),
        (
            mode == "secagg" and tiers and largest < privacy.threshold,
            f"federation.devices: {100 * largest:g} % of the clients train all of the mask, fewer than privacy.threshold asks for "
            f"({100 * privacy.threshold:g} %): a sum of the others' part would tell too much of each. Give more devices the "
            "largest density",
        ),
        (
            secure and message.up != "fp32",
            f"message.up: {message.up} does not go with privacy.aggregation: {mode}, whose values travel "
            f"{'in fixed point of privacy.bits' if mode == 'secagg' else 'in fp32, so that pads cancel'}: drop it",
        ),
        (
            secure and (message.top_k is not None or message.error_feedback),
            f"message.{'top_k' if message.top_k is not None else 'error_feedback'} does not go with privacy.aggregation: "
            f"{mode}: every client sends all values of the mask, and their rounding is part of the sum",
        ),
        (
            scaffold and (secure or robust or dp is not None),
            "federation.correction: scaffold sends a second vector for each client, its control variate, which "
            f"{'privacy.dp does not account for' if dp else f'{kind} does not protect' if robust else f'{mode} does not hide'}. "
            "Use fedprox, or drop it",
        ),
        (
            mode == "zero_sum" and lossy,
            "federation.failures: zero_sum loses every round in which a client does not answer, since its pad is missing from the "
            "sum. privacy.aggregation: secagg survives dropouts",
        ),
        (
            robust and (own or tiers),
            f"federation.aggregator: {kind} compares whole updates, but clients train different weights "
            f"({'mask.scope: client' if own else 'federation.devices with a density below 1'}). Use one mask for all, or mean",
        ),
    ]
    if dp is not None:
        conflicts += [
            (
                secure,
                f"privacy.dp does not go with aggregation: {mode}. A secure sum gives nothing below its threshold, so that one "
                "client more could bring others' updates in with it, and the noise would not cover that. Drop one of the two",
            ),
            (
                robust,
                f"privacy.dp knows what one client can do to a sum, not to federation.aggregator: {kind}. Use mean",
            ),
            (
                own,
                "privacy.dp does not go with mask.scope: client: the masks themselves tell of their clients. Use public, or shared "
                "with privacy.dp.scores",
            ),
            (
                federation.weighting != "uniform",
                "privacy.dp counts every client once: set federation.weighting: uniform",
            ),
            (
                federation.sampling == "shuffled",
                "privacy.dp draws every client on its own in each round, which federation.sampling: shuffled does not: drop it",
            ),
            (
                federation.minimum_replies > 1,
                "privacy.dp gives out noise in every round, whoever answers: drop federation.minimum_replies",
            ),
            (
                federation.blend,
                "federation.blend sends sums of all clients' scores, which privacy.dp does not account for",
            ),
            (
                federation.client_validation > 0,
                "federation.client_validation is measured on clients, which privacy.dp does not account for: use data.val_fraction",
            ),
            (
                any(sieve.scope == "shared" for sieve in scored) and dp.scores is None,
                "mask.scope: shared gives out sums of clients' scores. Account for them with privacy.dp.scores: {clip_norm: ..., "
                "noise_multiplier: ...}, let the server score its own images (scope: public), or use a rule of magnitude",
            ),
            (
                any(sieve.scope == "public" for sieve in scored) and not held,
                "mask.scope: public would score training images, since data.val_fraction is 0, and these are the clients' under "
                "privacy.dp. Hold some out",
            ),
            (
                dp.scores is not None and not any(sieve.scope == "shared" for sieve in scored),
                "privacy.dp.scores is given, but no mask is made from clients' scores: drop it",
            ),
            (
                ridge and dp.statistics is None,
                "method: ridge gives out sums of clients' features. Account for them with privacy.dp.statistics: {clip_norm: ..., "
                "noise_multiplier: ...}, or train the head in rounds",
            ),
            (
                not ridge and dp.statistics is not None,
                "privacy.dp.statistics is given, but no stage is solved by ridge",
            ),
            (
                ridge
                and not held
                and any(s.ridge.temperature is None for s in experiment.stages if s.method == "ridge"),
                "method: ridge fits its temperature on clients where data.val_fraction is 0, which privacy.dp does not account "
                "for: give ridge.temperature, or hold images out",
            ),
        ]
    attack = federation.attack
    refreshed = any(sieve.refresh for sieve in sieves)
    conflicts.append(
        (
            attack is not None and attack.kind == "stale_replay" and (refreshed or own),
            "federation.attack: stale_replay sends an old update, which goes with one mask for the whole stage",
        )
    )
    return conflicts


def _completed(stage: Any, top: Mapping[str, Any]) -> Any:
    if isinstance(stage, Mapping) and isinstance(stage.get("mask"), Mapping):
        return {**stage, "mask": {**top, **stage["mask"]}}
    return stage


# --- YAML ------------------------------------------------------------------------------------------------------------


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """YAML with the two surprises taken out: 1e-3 is a number, and only true and false are booleans."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if not tag.endswith((":bool", ":float", ":timestamp"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|false|True|False)$"), list("tfTF"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|nan|NaN))$"),
    list("-+0123456789."),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f'"{key}" is given twice', key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
# Deep, like mappings: a list that holds itself is then refused.
_Loader.add_constructor("tag:yaml.org,2002:seq", lambda loader, node: loader.construct_sequence(node, deep=True))


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text; a syntax error names `where` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        recursive = error.problem == "found unconstructable recursive node"
        problem = "an alias (*) stands for something that it is itself a part of" if recursive else error.problem
        raise FedsieveError(f"{where}{line}: not valid YAML: {problem}") from None
    except RecursionError:
        raise FedsieveError(f"{where}: not valid YAML: lists or mappings are nested too deep") from None
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise FedsieveError(f"{where}: not valid YAML: {error}") from None


class _Dumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    """Quotes what the loader would not read as a text."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def to_yaml(experiment: Experiment) -> str:
    """The experiment, every default written out, as YAML that reads back to the same experiment."""
    # Escaped: YAML takes some unprinted characters for line ends.
    return yaml.dump(experiment.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False)


# --- overrides -------------------------------------------------------------------------------------------------------


def apply_overrides(tree: Any, overrides: Iterable[str]) -> dict[str, Any]:
    """`tree` with each `dotted.path=value` set. Lists go by number, stages also by name (`stages.head.epochs=3`)."""
    tree = dict(tree) if isinstance(tree, Mapping) else {}
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise FedsieveError(f'command line: "{override}" is not of the form key=value, such as data.size=64')
        value = parse_yaml(text, f"command line: {path}")
        tree = _set(tree, keys, value, path)
    return tree


def _set(node: Any, keys: Sequence[str], value: Any, path: str) -> Any:
    """A copy of `node` with the value set at `keys`; a scalar on the way becomes a mapping, as in train.last_blocks=2."""
    if not keys:
        return value
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        names, index = _named_items(node, key)
        if not 0 <= index < len(node):
            allowed = ", ".join([*(name for name in names if name), *map(str, range(len(node)))])
            raise FedsieveError(
                f'command line: {path}: "{key}" is not there.{did_you_mean(key, names)} Allowed: {allowed}'
            )
        return [_set(item, rest, value, path) if i == index else item for i, item in enumerate(node)]
    branch = dict(node) if isinstance(node, Mapping) else {}
    branch[key] = _set(branch.get(key), rest, value, path)
    return branch


def _named_items(node: list[Any], key: str) -> tuple[list[str], int]:
    """The names of a list's items, and the place that a name or number means; no place where there is no such item."""
    names = [str(item.get("name")) if isinstance(item, Mapping) else "" for item in node]
    return names, names.index(key) if key in names else int(key) if key.isdigit() else -1


def override_place(tree: Any, override: str) -> tuple[str, ...]:
    """The keys that `dotted.path=value` sets in `tree`, stages by number: the same however they were named."""
    found = []
    for key in override.partition("=")[0].strip().split("."):
        if isinstance(tree, list):
            index = _named_items(tree, key)[1]
            key, tree = str(index), tree[index] if 0 <= index < len(tree) else None
        else:
            tree = tree.get(key) if isinstance(tree, Mapping) else None
        found.append(key)
    return tuple(found)


# --- validation ------------------------------------------------------------------------------------------------------


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in the YAML file `path`, with `key=value` overrides applied."""
    return parse_config(read_config(Path(path)), overrides, where=str(path))


def read_config(path: Path) -> str:
    """The text of an experiment's YAML file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FedsieveError(
            f"{path}: no such file. `fedsieve demo --show` prints an experiment to start from"
        ) from None
    except IsADirectoryError:
        raise FedsieveError(f"{path}: is a folder; an experiment is a YAML file") from None
    except UnicodeDecodeError:
        raise FedsieveError(f"{path}: not a text file; an experiment is a YAML file") from None
    except OSError as error:
        raise FedsieveError(f"{path}: cannot be read: {error.strerror}") from None


def parse_config(text: str, overrides: Sequence[str] = (), where: str = "config") -> Experiment:
    """The experiment in a YAML text; `where` names it in error messages."""
    return make_experiment(parse_yaml(text, where), overrides, where)


def make_experiment(tree: Any, overrides: Sequence[str] = (), where: str = "config") -> Experiment:
    """The experiment in a tree of mappings and lists, as YAML holds it."""
    if tree is None:
        tree = {}
    if not isinstance(tree, Mapping):
        raise FedsieveError(
            f"{where}: an experiment is a mapping of keys such as data, model and stages, not {_kind(tree)}"
        )
    try:
        return Experiment.model_validate(apply_overrides(tree, overrides))
    except ValidationError as error:
        raise FedsieveError("\n".join(_explain(error, tree, where, overrides))) from None


def _explain(error: ValidationError, written: Mapping[str, Any], where: str, overrides: Sequence[str]) -> list[str]:
    """One line per problem: place, key, what is wrong, what is allowed."""
    lines = []
    tree = apply_overrides(written, overrides)
    overridden = {override.partition("=")[0].strip() for override in overrides}
    for problem in error.errors():
        keys, model = _locate(problem["loc"])
        if _is_inherited(keys, tree):
            continue
        key = ".".join(_named(keys, tree))
        paths = (key, ".".join(map(str, keys)))
        given = any(f"{path}.".startswith(f"{override}.") for path in paths for override in overridden)
        culprits = [] if given else _culprits(problem, written, overrides)
        place = "command line" if given else f"command line, {' and '.join(culprits)}" if culprits else where
        text = _sentence(problem, keys, model)
        lines.append(f"{place}: {key}: {text}" if key else f"{place}: {text}")
    return lines


def _culprits(problem: Any, written: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The overrides without which a problem of several keys together would not be there; none where it is the file's own."""

    def there(some: Sequence[str]) -> bool:
        try:
            Experiment.model_validate(apply_overrides(written, some))
        except ValidationError as error:
            return any((other["loc"], other["msg"]) == (problem["loc"], problem["msg"]) for other in error.errors())
        except FedsieveError:  # one goes into what another has made
            return True
        return False

    if not overrides or there([]):
        return []
    single = [own for place, own in enumerate(overrides) if not there([*overrides[:place], *overrides[place + 1 :]])]
    return single or list(overrides)


def _is_inherited(keys: list[int | str], tree: Mapping[str, Any]) -> bool:
    """Whether a problem in a stage's mask comes from the mask at the top, where it is told already."""
    if len(keys) < 4 or keys[0] != "stages" or keys[2] != "mask" or not isinstance(tree.get("mask"), Mapping):
        return False
    return keys[3] not in tree["stages"][keys[1]]["mask"] and keys[3] in tree["mask"]


def _locate(loc: tuple[int | str, ...]) -> tuple[list[int | str], type[BaseModel]]:
    """The keys of a pydantic location (union tags, which start with #, dropped) and the model that holds the last
    of them that is a name."""
    keys = [key for key in loc if not str(key).startswith("#")]
    model: type[BaseModel] = Experiment
    for key in [key for key in keys if isinstance(key, str)][:-1]:
        if key in model.model_fields and (inner := _models_in(model.model_fields[key].annotation)):
            model = inner[0]
    return keys, model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models mentioned anywhere in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models_in(part)]


def _named(keys: list[int | str], tree: Any) -> list[str]:
    """Keys as a reader writes them: stages by name where they have one."""
    names = []
    for key in keys:
        item = None
        if isinstance(tree, Mapping):
            item = tree.get(key)
        elif isinstance(tree, list) and isinstance(key, int) and key < len(tree):
            item = tree[key]
        named = isinstance(key, int) and isinstance(item, Mapping) and isinstance(item.get("name"), str)
        names.append(item["name"] if named else str(key))  # type: ignore[index]
        tree = item
    return names


def _sentence(problem: Any, keys: list[int | str], model: type[BaseModel]) -> str:
    kind, given, context = problem["type"], problem.get("input"), problem.get("ctx", {})
    names = [key for key in keys if isinstance(key, str)]
    field = model.model_fields.get(names[-1]) if names else None
    if kind == "extra_forbidden":
        allowed = list(model.model_fields)
        return f"unknown key.{did_you_mean(str(keys[-1]), allowed)} Allowed: {', '.join(allowed)}"
    if kind == "missing":
        return "required, but not given"
    listed = isinstance(keys[-1], int) if keys else False
    if field is not None and (words := _words(field.annotation, listed)) and kind == "literal_error":
        return f"{given!r} is not allowed.{did_you_mean(str(given), words)} Allowed: {', '.join(words)}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "model_type" and field is not None and (inner := _models_in(field.annotation)):
        return f"should be a mapping, got {_kind(given)} {given!r}. Its keys: {', '.join(inner[0].model_fields)}"
    if kind.endswith("_type") or kind in ("int_from_float", "bool_parsing"):
        return f"{problem['msg'].removeprefix('Input ')}, got {_kind(given)} {given!r}"
    return f"{problem['msg'].removeprefix('Input ')}, got {given!r}"


def _words(annotation: Any, listed: bool = False) -> list[str]:
    """The words a choice allows, or with `listed` those its lists do; empty where the field is no choice."""
    if annotation is LastBlocks:
        return [] if listed else ["{last_blocks: N}"]
    origin = get_origin(annotation)
    if origin is Literal:
        return [] if listed else [str(word) for word in get_args(annotation)]
    within = listed and origin is not list
    return list(dict.fromkeys(word for part in get_args(annotation) for word in _words(part, within)))


def _kind(value: Any) -> str:
    return {
        str: "the text",
        int: "the number",
        float: "the number",
        bool: "the switch",
        type(None): "the empty value",
    }.get(type(value), "a list" if isinstance(value, list) else "a mapping")
