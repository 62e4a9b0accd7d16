"""All settings of an experiment, each class with the checks that need no other class."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from fedsieve.config.conflicts import all_conflicts
from fedsieve.config.strict import (
    Count,
    Fraction,
    NonNegative,
    Positive,
    Rate,
    Share,
    Strict,
    changed_keys,
    only_with,
    setting,
)
from fedsieve.config.words import (
    SGD,
    AggregatorChoice,
    Attack,
    Correction,
    CrossEntropy,
    Iid,
    LeastSensitive,
    MeanOfUpdates,
    NoCorrection,
    ObjectiveChoice,
    Optimizer,
    Partition,
    Rule,
    Server,
    ServerSGD,
    TensorBoard,
    TrackerChoice,
)

NoiseMultiplier = Annotated[float, Field(ge=0.05)]  # less hides nothing, and cannot be accounted for
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
ListOrOne = Discriminator(lambda value: "#several" if isinstance(value, list) else "#one")

Transform = Literal["resize", "flip", "crop_flip", "flip_rotate"]
Interpolation = Literal["bilinear", "bicubic"]
Part = Literal["head", "backbone", "all", "lora", "adapter"]
Granularity = Literal["weight", "row", "attention_head", "block"]
Allocation = Literal["global", "tensor", "block"]
LayerKind = Literal["linear", "attention", "norm", "conv", "bias", "other"]
ValueFormat = Literal["fp32", "bf16", "fp16", "int8", "int4", "sign", "coo"]
PersonalMethod = Literal["local", "head", "norms", "mask", "blend"]


class Data(Strict):
    """The images, their split, and how they reach the model."""

    source: str = setting(
        "uoft-cs/cifar100", "hub id, folder of parquet files or class folders, digits, or none where sites hold all"
    )
    subset: str | None = setting(None, "configuration name of a hub dataset that has several")
    revision: str | None = setting(None, "hub revision: branch, tag or commit")
    image_column: str | None = setting(None, "found by itself when there is only one")
    label_column: str | None = setting(None, "found by itself when there is only one")
    train_split: str = "train"
    test_split: str | None = setting(None, 'default: "test" where the source has it, held out otherwise')
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = setting(0.2, "where no test split exists; ignores the seed")
    classes: list[int] | None = setting(None, "keep only these classes, numbered as in the source")
    class_names: Annotated[list[str], Field(min_length=2)] | None = setting(None, "label map; default: sorted classes")
    size: Annotated[int, Field(ge=4, le=2048)] = 224
    transform: Transform = "resize"
    interpolation: Interpolation = "bicubic"
    normalize: Literal["data", "imagenet", "half"] = "imagenet"
    crop_scale: tuple[float, float] = setting((0.5, 1.0), "area of a random crop, as shares of the image")
    rotation: Annotated[float, Field(ge=0, le=180)] = setting(15.0, "largest angle of flip_rotate, degrees")
    val_fraction: Fraction = setting(0.1, "0 trains on everything and selects nothing")
    stratified: bool = setting(True, "the validation split keeps the class shares")
    placement: Literal["auto", "device", "mapped"] = setting("auto", "on the device, or memory-mapped from disk")
    cache: str | None = setting(None, "folder of decoded images; default $FEDSIEVE_CACHE or ~/.cache/fedsieve")

    @field_validator("crop_scale", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    def conflicts(self) -> Iterator[str]:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            yield f"crop_scale must be two shares with 0 < low <= high <= 1, got [{low}, {high}]"
        if self.classes is not None and (len(set(self.classes)) != len(self.classes) or len(self.classes) < 2):
            yield "classes must name at least two different classes"
        if self.test_split == self.train_split:
            yield "test_split and train_split are the same: the test images would be trained on"
        if self.classes is not None and min(self.classes) < 0:
            yield "classes are numbered from 0"
        if self.class_names is not None and len(set(self.class_names)) != len(self.class_names):
            yield "class_names: one is named twice"
        if self.source == "none" and self.class_names is None:
            yield "source: none knows no classes: name them in class_names"


class Lora(Strict):
    """Low-rank updates beside linear layers (Hu et al. 2022): W x + alpha / rank * B A x, with B = 0 at first.

    Before B has moved, A has no gradient: its Fisher scores are zero.
    """

    rank: Positive = 8
    alpha: Rate = 16.0
    targets: Annotated[list[str], Field(min_length=1)] = setting(["attn.qkv", "attn.proj"], "ends of layers' names")


class Bottleneck(Strict):
    """A small layer behind every block's MLP (Houlsby et al. 2019): x + up(gelu(down(x))), with up = 0 at first.

    Before up has moved, down has no gradient: its Fisher scores are zero.
    """

    width: Positive = 32


class Model(Strict):
    """The pretrained network, and the classifier on top of it."""

    backbone: str = setting("vit_small_patch16_224.dino", "any timm classifier: `fedsieve list models`")
    weights: str = setting("hub", "hub, none, digits (made in seconds from the embedded data), a file, or a run folder")
    head: Literal["linear", "mlp"] = "linear"
    hidden: Positive = setting(512, "width of the mlp head")
    options: dict[str, Any] = setting({}, "passed to timm.create_model, e.g. {depth: 4, embed_dim: 64}")
    lora: Lora | None = setting(None, "needs fedsieve[lora]; trained by stages that say train: lora")
    adapter: Bottleneck | None = setting(None, "trained by stages that say train: adapter")

    @field_validator("options")
    @classmethod
    def _check_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        if run_together := next((key for key in options if ":" in key), None):
            raise ValueError(f"{run_together}: a colon needs a space after it, as in {{depth: 4}}")
        return options


class Fisher(Strict):
    """The measurement of sensitivity."""

    samples: Positive = setting(1024, "training images that are scored, drawn by the seed")
    per: Literal["sample", "batch"] = setting("sample", "batch squares a batch's mean gradient: cheaper, biased low")
    batch_size: Positive = setting(64, "for per: batch")
    labels: bool = setting(False, "score with the data's labels instead of labels drawn from the model")
    target: Literal["log_prob", "logit"] = setting("log_prob", "what is differentiated")


class Sieve(Strict):
    """The mask: which weights may train."""

    file: str | None = setting(None, "a mask that a run or `fs.Mask.save` wrote, instead of a calibration")
    rule: Rule = setting(LeastSensitive(), "which weights may train: `fedsieve list rules`")
    sparsity: Fraction = setting(0.9, "the share of maskable weights that is frozen")
    calibration_rounds: Annotated[int, Field(ge=1, le=1000)] = 1
    schedule: Literal["exponential", "linear"] = setting("exponential", "the density over calibration rounds")
    granularity: Granularity = "weight"
    allocation: Allocation = setting("global", "one threshold, or the same density in each tensor or block")
    kinds: Annotated[
        Annotated[Literal["default", "all"], Tag("#one")] | Annotated[list[LayerKind], Tag("#several")],
        ListOrOne,
    ] = setting("default", "layer kinds that take part; all adds tokens and position embeddings")
    min_active_per_tensor: Count = 1
    shrink: Annotated[float, Field(ge=0, le=1)] = setting(1.0, "factor on frozen weights from the second scoring on")
    alpha: Annotated[float, Field(ge=0, le=1)] = setting(0.5, "the share of sensitivity in hybrid rules")
    scale: Literal["ranks", "max", "none"] = setting("ranks", "how hybrid rules make two scores comparable; none: raw")
    fisher: Fisher = Fisher()
    scope: Literal["shared", "client", "public"] = setting(
        "shared", "from all clients' scores, one per client, or from the server's validation (else training) images"
    )
    clients: Positive | None = setting(None, "in a federation, shared: how many score; default: as many as a round has")
    refresh: Positive | None = setting(None, "in a federation: rounds from one calibration to the next")
    start_sparsity: Fraction | None = setting(None, "with refresh: the first mask's; it moves evenly to `sparsity`")

    @model_validator(mode="before")
    @classmethod
    def _finished_mask(cls, value: Any) -> Any:
        """A file needs no rule."""
        return {**value, "rule": "given"} if isinstance(value, Mapping) and value.get("file") else value

    def conflicts(self) -> Iterator[str]:
        if self.file and self.scope == "client":
            yield "file: one mask for all clients; drop scope: client"
        if self.file and self.refresh:
            yield "refresh calibrates new masks, and file names a finished one: drop one of them"

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
    """A client's work in one round: passes over its images, or single steps."""

    epochs: Positive | None = setting(None, "default 1 where no steps are given")
    steps: Positive | None = None
    batch_size: Positive | None = setting(None, "of a step; another place for batch_size")

    def conflicts(self) -> Iterator[str]:
        if self.epochs and self.steps:
            yield "local work is counted in epochs or in steps, not both"


def _batch_of_local(value: Any) -> Any:
    """Local work may name the size of its batches."""
    local = value.get("local") if isinstance(value, Mapping) else None
    size = local.get("batch_size") if isinstance(local, Mapping) else getattr(local, "batch_size", None)
    if size is None or value.get("batch_size", size) == size:
        return value if size is None else {**value, "batch_size": size}
    raise ValueError(f"batch_size is {value['batch_size']}, and local.batch_size is {size}: give one of them")


class Ridge(Strict):
    """A head in closed form: (G + strength n I) W = B, then logits scaled by a temperature."""

    strength: Rate | None = setting(None, "per image; default: the best of a grid on validation, or 1e-3")
    temperature: Rate | None = setting(None, "default: fitted on validation, or on nothing at 1")


class Stage(Strict):
    """One phase of an experiment: what trains, and for how long."""

    name: Annotated[Name, Field(max_length=60)]
    train: Annotated[
        Annotated[TrainedPart, Tag("#one")] | Annotated[list[TrainedPart], Field(min_length=1), Tag("#several")],
        ListOrOne,
        AfterValidator(lambda train: train[0] if isinstance(train, list) and len(train) == 1 else train),
    ] = setting("all", "a part, or several; `fedsieve list parts` explains them")
    epochs: Positive | None = setting(None, "passes over the data, where training is central")
    rounds: Positive | None = setting(None, "communication rounds, in a federation")
    local: Local = Local()
    budget: Positive | None = setting(None, "in a federation, instead of rounds: local epochs (or steps) times rounds")
    method: Literal["sgd", "ridge"] = setting("sgd", "ridge: a closed-form head, in one round")
    ridge: Ridge = Ridge()
    batch_size: Positive = 128
    optimizer: Optimizer = SGD()
    objective: ObjectiveChoice = setting(CrossEntropy(), "the loss of an example: `fedsieve list objectives`")
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: NonNegative = 0.0
    warmup_rounds: Count = setting(0, "in a federation")
    early_stopping: Positive | None = setting(None, "stop after this many epochs without a better one")
    sparse: bool = setting(False, "only the weights of a calibrated mask train")
    mask: Sieve | None = setting(None, "makes the stage sparse; what it leaves open is as in the mask at the top")

    _batch = model_validator(mode="before")(_batch_of_local)

    @property
    def parts(self) -> list[Part | LastBlocks]:
        """The parts that train, always as a list."""
        return self.train if isinstance(self.train, list) else [self.train]

    @property
    def length(self) -> int:
        """The number of epochs, or rounds in a federation, unless the stage stops early."""
        per_round = self.local.steps or self.local.epochs or 1
        return self.epochs or self.rounds or max(1, round((self.budget or 1) / per_round))

    @property
    def spent(self) -> str | None:
        """A sentence on the whole rounds that a budget pays for; None without a budget."""
        if self.budget is None:
            return None
        unit, each = ("steps", self.local.steps) if self.local.steps else ("epochs", self.local.epochs or 1)
        return f"a budget of {self.budget:,} local {unit} at {each} a round is {self.length:,} rounds, {self.length * each:,} {unit}"

    def conflicts(self) -> Iterator[str]:
        if self.epochs is not None and self.warmup_epochs > self.epochs:
            yield f"warmup_epochs ({self.warmup_epochs:g}) is longer than the stage ({self.epochs} epochs)"
        if self.rounds and self.budget:
            yield "rounds and budget both say how long the stage is: give one"
        if (self.rounds or self.budget) and self.warmup_rounds > self.length:
            yield f"warmup_rounds ({self.warmup_rounds}) is longer than the stage ({self.length} rounds)"
        stepwise = (
            "local",
            "batch_size",
            "optimizer",
            "schedule",
            "warmup_epochs",
            "warmup_rounds",
            "early_stopping",
            "objective",
        )
        if self.method == "ridge" and (ignored := changed_keys(self, *stepwise)):
            yield f"{ignored[0]} needs method: sgd; ridge solves for the head at once"
        if self.method == "sgd" and changed_keys(self, "ridge"):
            yield "ridge needs method: ridge, and method is sgd"
        if self.method == "ridge" and self.train != "head":
            yield "method: ridge solves for a head: it needs train: head"
        if self.method == "ridge" and (self.sparse or self.mask):
            yield "method: ridge solves for the whole head: it takes no mask"


class Failures(Strict):
    """A simulated trace of what goes wrong, drawn by the seed."""

    unavailable: Fraction = setting(0.0, "chosen clients that cannot be reached: nothing is sent to them")
    crash: Fraction = setting(0.0, "clients that got the model and never answer")
    corrupt: Fraction = setting(0.0, "replies damaged on the way")
    deadline: Rate | None = setting(None, "simulated seconds; later replies are refused")


class Device(Strict):
    """A kind of client device. Clients are dealt to the kinds by their shares."""

    share: Share = 1.0
    density: Share = setting(1.0, "of the shared mask: smaller budgets train nested tiers of it")
    work: Share = setting(1.0, "of the local steps")
    delay: NonNegative = setting(0.0, "mean simulated seconds until it answers")


class Personal(Strict):
    """Models of single clients, made from the global one at the end, each tested as its client sees the world."""

    methods: Annotated[list[PersonalMethod], Field(min_length=1)] = setting(["local"], "`fedsieve list personal`")
    clients: Positive | None = setting(None, "how many, drawn by the seed; default: all")
    local: Local = Local()
    batch_size: Positive = 50
    optimizer: Optimizer = SGD()
    _batch = model_validator(mode="before")(_batch_of_local)

    as_trained: bool = setting(False, "local, mask: with the optimizer and rate of the stage that trained the weights")

    def conflicts(self) -> Iterator[str]:
        if len(set(self.methods)) != len(self.methods):
            yield "methods: one is named twice"
        if self.as_trained and not {"local", "mask"} & set(self.methods):
            yield "as_trained needs the methods local and mask: the others have no stage to train as"


class Federation(Strict):
    """Clients that keep their data, and a server that averages what they learnt."""

    clients: Positive | None = setting(None, "default 100; a natural partition brings its own number")
    partition: Partition = Iid()
    cohort: int | float = setting(0.1, "clients per round: a share, or a number")
    sampling: Literal["independent", "shuffled"] = setting("independent", "a draw each round, or all clients in turn")
    weighting: Literal["examples", "uniform"] = "examples"
    divide_by: Literal["holders", "all"] = setting("holders", "by the weight of those who hold a value, or of all")
    aggregator: AggregatorChoice = setting(MeanOfUpdates(), "a kind, or a kind with its settings")
    attack: Attack | None = setting(None, "a kind, or a kind with its settings; default: nobody is hostile")
    server: Server = ServerSGD()
    correction: Correction = NoCorrection()
    minimum_replies: Positive = setting(1, "good replies without which a round changes nothing")
    failures: Failures = Failures()
    devices: list[Device] = setting([], "uneven devices; default: all alike")
    held_out: Fraction = setting(0.0, "clients that never train, for testing on strangers")
    evaluate_every: Positive = setting(1, "rounds from one evaluation to the next")
    client_validation: Fraction = setting(0.0, "of each client's images, to measure the model on in the next round")
    blend: bool = setting(False, "Fisher blending: clients mix what they receive with their own last weights")
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

    def conflicts(self) -> Iterator[str]:
        if self.clients is None and self.partition.kind == "sites":
            yield "clients: say how many sites there are"
        if self.clients is not None and self.partition.kind == "natural":
            yield "a natural partition brings its own number of clients: drop clients"
        if self.devices and abs(sum(device.share for device in self.devices) - 1) > 1e-6:
            yield "devices: their shares must add up to 1"
        if self.failures.deadline is not None and not any(device.delay for device in self.devices):
            yield (
                "failures.deadline is for devices that take their time, and none does: give devices a delay, such as "
                "devices: [{delay: 10}]"
            )

    @property
    def tiered(self) -> bool:
        """Whether some devices train only a part of the shared mask."""
        return any(device.density < 1 for device in self.devices)

    def strangers(self, clients: int) -> int:
        """The number of clients that never train, of `clients` in all."""
        return round(self.held_out * clients)

    def cohort_size(self, trainers: int) -> int:
        """The number of clients in a round, of `trainers` that train."""
        return self.cohort if isinstance(self.cohort, int) else max(1, round(self.cohort * trainers))


class Message(Strict):
    """The formats of values on their way to the server, and from it."""

    up: ValueFormat = "fp32"
    down: ValueFormat = "fp32"
    group: Annotated[int, Field(ge=8, le=65535)] = setting(64, "int8, int4, sign: values that share a scale")
    top_k: Share | None = setting(None, "send only this share of an update, the largest values")
    error_feedback: bool = setting(False, "clients keep what rounding took and add it to their next update")

    def conflicts(self) -> Iterator[str]:
        if self.down == "sign":
            yield "down: sign keeps no weights, only directions: use it for up"
        if self.top_k is not None and self.up == "coo":
            yield "up: coo is kept as the reports count it: top_k works with the other formats"
        if changed_keys(self, "group") and not {self.up, self.down} & {"int8", "int4", "sign"}:
            yield "group needs int8, int4 and sign, and neither up nor down is one of them"


class Noised(Strict):
    """A sum that is given out with noise: each client's part is first shortened to a norm."""

    clip_norm: Rate
    noise_multiplier: NoiseMultiplier = Field(description="the noise's deviation, by clip_norm")


class DP(Strict):
    """Client-level differential privacy with a trusted server (McMahan et al. 2018)."""

    epsilon: Rate | None = setting(None, "that the whole experiment may spend; the noise follows from it")
    noise_multiplier: NoiseMultiplier | None = setting(None, "instead of epsilon: the noise's deviation, by clip_norm")
    delta: Annotated[float, Field(ge=1e-12, lt=1)] = setting(1e-5, "far below one in the number of clients")
    clip_norm: Rate = Field(description="the largest L2 norm of an update")
    scores: Noised | None = setting(None, "of a mask from clients' scores, which the budget then pays for")
    statistics: Noised | None = setting(None, "of a ridge head, which the budget then pays for")

    def conflicts(self) -> Iterator[str]:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            yield "dp needs either epsilon, from which the noise follows, or noise_multiplier, not both"


class Privacy(Strict):
    """Limits to what the server learns of single clients: docs/trust.md says what each mode promises."""

    aggregation: Literal["plain", "zero_sum", "secagg"] = setting(
        "plain", "secagg: only sums (Bonawitz et al. 2017); zero_sum: the secure report's pads, to compare"
    )
    threshold: Annotated[float, Field(gt=0.5, le=1)] = setting(0.66, "secagg: the share of a cohort that a sum needs")
    bits: Literal[16, 32, 64] = setting(32, "secagg: of a value of an update; other sums have 64")
    bound: Rate = setting(1.0, "secagg: the largest value of an update; larger ones are clipped, with a warning")
    pad_scale: Rate = setting(1.0, "zero_sum: the deviation of the pads")
    pad_offset: Count = setting(0, "zero_sum: a pad's seed is this plus the client's number")
    dp: DP | None = None

    def conflicts(self) -> Iterator[str]:
        return only_with(self, "aggregation", secagg="threshold bits bound", zero_sum="pad_scale pad_offset")


class Checkpoints(Strict):
    """The time between checkpoints, and how many are kept."""

    every_seconds: NonNegative = 60.0
    keep: Annotated[int, Field(ge=2)] = setting(2, "two at least: the newest may be damaged")


class Experiment(Strict):
    """One validated experiment. Running it gives one run folder."""

    name: Annotated[Name, Field(max_length=100)] = "experiment"
    seed: Count = 0
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    precision: Literal["auto", "fp32", "bf16"] = setting("auto", "auto: bf16 autocast from GPU capability 8, else fp32")
    deterministic: bool = setting(False, "bit-identical repeats on a GPU too, at some cost in speed")
    threads: Positive | None = setting(None, "CPU threads; small networks are fastest, and repeat anywhere, on 1")
    test: bool = setting(True, "open the test set at the end; false while settings are chosen, as in a sweep's trials")
    test_curve: bool = setting(False, "also test after every epoch; nothing is ever selected on it")
    data: Data = Data()
    model: Model = Model()
    mask: Sieve | None = setting(None, "the mask of every sparse stage that has none of its own")
    federation: Federation | None = setting(None, "absent: training is central")
    message: Message = Message()
    privacy: Privacy = Privacy()
    executor: Literal["auto", "sequential", "stacked", "distributed"] = "auto"
    clients_at_once: Positive | None = setting(None, "stacked: default, as many as fit; makes distributed stacked")
    compile: Literal["auto", "eager", "graph", "blocks", "full"] = setting(
        "auto",
        "graph: steps as CUDA graphs; full: torch.compile too, the fastest once it is ready; blocks: each kind of block "
        "compiled once, sooner ready; eager: none of these. auto: eager on a CPU; on a GPU graph, and full for long runs",
    )
    stages: Annotated[list[Stage], Field(min_length=1)]
    tracking: list[TrackerChoice] = setting([TensorBoard()], "in addition to metrics.jsonl")
    checkpoint: Checkpoints = Checkpoints()

    @model_validator(mode="before")
    @classmethod
    def _complete_masks(cls, tree: Any) -> Any:
        """Fill what a stage's mask leaves open from the mask at the top."""
        top, stages = (tree.get("mask"), tree.get("stages")) if isinstance(tree, Mapping) else (None, None)
        if not isinstance(top, Mapping) or not isinstance(stages, list):
            return tree
        try:
            Sieve.model_validate(top)
        except ValidationError:  # which is reported at the top, and not again at every stage
            return tree

        def complete(stage: Any) -> Any:
            own = stage.get("mask") if isinstance(stage, Mapping) else None
            return {**stage, "mask": {**top, **own}} if isinstance(own, Mapping) else stage

        return {**tree, "stages": [complete(stage) for stage in stages]}

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError(f"{device!r} is not allowed. Allowed: auto, cpu, cuda, cuda:N")
        return device

    def conflicts(self) -> Iterator[str]:
        return all_conflicts(self)

    def mask_of(self, stage: Stage) -> Sieve | None:
        """The mask settings of a stage; None where every weight of the stage trains."""
        return stage.mask or (self.mask if stage.sparse else None)

    @property
    def sieves(self) -> list[Sieve]:
        """The mask settings of all sparse stages."""
        return [sieve for sieve in map(self.mask_of, self.stages) if sieve is not None]

    @property
    def own_masks(self) -> bool:
        """Whether clients have masks of their own in some stage."""
        return any(sieve.scope == "client" for sieve in self.sieves)

    @property
    def changing_masks(self) -> bool:
        """Whether the mask changes within some stage."""
        return any(sieve.refresh for sieve in self.sieves)

    @property
    def own_images(self) -> bool:
        """Whether clients are sites with images of their own, and do not share out one source."""
        return self.federation is not None and self.federation.partition.kind == "sites"
