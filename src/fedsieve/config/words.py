"""The built-in words of each family. Each class is one word; its first line is what `fedsieve list` shows."""

from collections.abc import Iterator
from math import ceil, floor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from fedsieve.config.choice import Choice
from fedsieve.config.strict import Count, Fraction, NonNegative, Positive, Rate, setting

if TYPE_CHECKING:
    from fedsieve.config.schema import Experiment


# --- optimizers ------------------------------------------------------------------------------------------------------


class Optimizer(Choice):
    """How weights move. In a sparse stage only those of the mask do."""

    family, place, default = "optimizer", "stages.optimizer.kind", "sgd"

    lr: Rate = 0.01
    momentum: Fraction = setting(0.9, "adamw: its first momentum")
    weight_decay: NonNegative = 0.0
    clip_norm: Rate | None = setting(None, "largest L2 norm of a gradient")
    rescale: Annotated[float, Field(ge=1)] | None = setting(
        None, "a masked gradient regains the norm of the whole one, growing by this factor at most"
    )


class SGD(Optimizer):
    """SGD with momentum"""

    word, home = "sgd", "fedsieve.train.optimizers:sgd_update"

    nesterov: bool = False

    def conflicts(self) -> Iterator[str]:
        if self.nesterov and self.momentum == 0:
            yield "nesterov needs momentum above 0"


class AdamW(Optimizer):
    """Adam with decoupled weight decay"""

    word, home = "adamw", "fedsieve.train.optimizers:adamw_update"

    beta2: Fraction = setting(0.999, "its second momentum; `momentum` is its first")

    @property
    def fields(self) -> dict[str, Any]:
        return {"betas": (self.momentum, self.beta2)}


class Server(Choice):
    """How the server moves along the clients' mean update (Reddi et al. 2021)."""

    family, place, key, default = "server", "federation.server.optimizer", "optimizer", "sgd"
    buffers: ClassVar[tuple[str, ...]] = ()

    lr: Rate = 1.0
    schedule: Literal["cosine", "constant"] = setting("constant", "of the server's rate over rounds")

    @property
    def steps(self) -> dict[str, Any]:
        """The settings of a single step."""
        return {name: value for name, value in self.fields.items() if name != "momentum_correction"}


class WithMomentum(Server):
    momentum: Fraction = setting(0.9, "the first momentum of adam, yogi and adagrad")
    momentum_correction: Literal["keep", "scale", "reset"] = setting(
        "keep", "for weights that stay in a new mask: all, in proportion to the overlap of the two masks, or none"
    )

    def clashes(self, experiment: "Experiment") -> Iterator[str]:
        if self.momentum_correction != "keep" and not experiment.changing_masks:
            yield "federation.server.momentum_correction needs mask.refresh: no mask ever changes"


class ServerSGD(Server):
    """move by lr times the mean update; with lr 1, FedAvg"""

    word, home = "sgd", "fedsieve.federation.server_optimizers:sgd"


class ServerMomentum(WithMomentum):
    """FedAvgM"""

    word, home = "momentum", "fedsieve.federation.server_optimizers:momentum"
    buffers = ("momentum",)


class Adaptive(WithMomentum):
    buffers = ("first", "second")

    tau: Rate = setting(1e-3, "what is added to the root")


class ServerAdam(Adaptive):
    """FedAdam"""

    word, home = "adam", "fedsieve.federation.server_optimizers:adam"

    beta2: Fraction = 0.99


class ServerYogi(Adaptive):
    """FedYogi"""

    word, home = "yogi", "fedsieve.federation.server_optimizers:yogi"

    beta2: Fraction = 0.99


class ServerAdagrad(Adaptive):
    """FedAdagrad"""

    word, home = "adagrad", "fedsieve.federation.server_optimizers:adagrad"


# --- what clients do -------------------------------------------------------------------------------------------------


class Correction(Choice):
    """A term that clients add to their loss or gradient against drift."""

    family, place, default = "correction", "federation.correction.kind", "none"


class NoCorrection(Correction):
    """clients train as they would alone"""

    word = "none"


class FedProx(Correction):
    """a pull of `mu` towards the received weights"""

    word, home = "fedprox", "fedsieve.train.local_step:fedprox"

    mu: NonNegative = setting(0.01, "weight of the distance to the global model")


class Scaffold(Correction):
    """control variates, sent both ways"""

    word = "scaffold"

    def clashes(self, experiment: "Experiment") -> Iterator[str]:
        federation, mode = experiment.federation, experiment.privacy.aggregation
        assert federation is not None
        if experiment.own_masks or federation.tiered or experiment.changing_masks:
            yield "federation.correction: scaffold needs one mask, the same for all clients and rounds"
        kind = federation.aggregator.kind
        unprotected = {
            "privacy.dp does not account for": experiment.privacy.dp is not None,
            f"{kind} does not protect": kind != "mean",
            f"{mode} does not hide": mode != "plain",
        }
        if cause := next((cause for cause, holds in unprotected.items() if holds), None):
            yield (
                "federation.correction: scaffold sends a second vector for each client, its control variate, which "
                f"{cause}. Use fedprox, or drop it"
            )


class FedNTD(Correction):
    """distillation of the received model's answers for all but the true class (`beta`, `tau`)"""

    word = "fedntd"

    beta: NonNegative = setting(1.0, "weight of the distillation")
    tau: Rate = setting(1.0, "its temperature")


class Attack(Choice):
    """What hostile clients do: the same clients for the whole experiment, drawn by the seed."""

    family, place, default = "attack", "federation.attack", "sign_flip"

    fraction: Fraction = setting(0.2, "of all clients")


class LabelFlip(Attack):
    """it trains on the last class for the first, and so on"""

    word = "label_flip"


class SignFlip(Attack):
    """the update times -`factor`"""

    word, home = "sign_flip", "fedsieve.federation.attacks:sign_flip"

    factor: Rate = 10.0


class GaussianNoise(Attack):
    """noise of `factor` times the update's norm"""

    word, home = "gaussian_noise", "fedsieve.federation.attacks:gaussian_noise"

    factor: Rate = 10.0


class NotANumber(Attack):
    """no numbers at all: refused by the decoder"""

    word, home = "nan", "fedsieve.federation.attacks:nan"


class StaleReplay(Attack):
    """the client's first update, again and again"""

    word, home = "stale_replay", "fedsieve.federation.attacks:stale_replay"

    def clashes(self, experiment: "Experiment") -> Iterator[str]:
        if experiment.own_masks or experiment.changing_masks:
            yield "federation.attack: stale_replay sends an old update, which needs one mask for the whole stage"


class Partition(Choice):
    """Which client holds which training examples."""

    family, place, default = "partition", "federation.partition.kind", "iid"


class Iid(Partition):
    """shuffled and split evenly"""

    word, home = "iid", "fedsieve.data.partitions:iid"


class Classes(Partition):
    """exactly `nc` classes each, every class owned, owners drawn at random"""

    word, home = "classes", "fedsieve.data.partitions:by_classes"

    nc: Positive = Field(description="how many classes each client holds")


class Dirichlet(Partition):
    """class shares drawn with `alpha`: the smaller, the more skewed; at most `nc` classes, if given"""

    word, home = "dirichlet", "fedsieve.data.partitions:dirichlet"

    alpha: Rate = Field(description="the smaller, the more skewed")
    min_size: Positive = setting(1, "examples every client has at least")
    nc: Positive | None = setting(None, "the most classes that one client holds")


class Quantity(Partition):
    """sizes drawn with `alpha`, classes mixed"""

    word, home = "quantity", "fedsieve.data.partitions:quantity"

    alpha: Rate = Field(description="the smaller, the more skewed")
    min_size: Positive = setting(1, "examples every client has at least")


class Natural(Partition):
    """by `column`, such as a user id"""

    word = "natural"

    column: str = Field(description="the column that names the client")


class Sites(Partition):
    """each client elsewhere, with data of its own, as `fedsieve flower` has it"""

    word = "sites"


# --- what the server makes of updates --------------------------------------------------------------------------------


class AggregatorChoice(Choice):
    """How updates become one; all but mean also after `mix`, for clients that differ."""

    family, place, default = "aggregator", "federation.aggregator", "mean"

    def refuse(self, count: int) -> Iterator[str]:
        """Yields a sentence for each reason why the rule cannot work with `count` updates."""
        if count == 0:
            yield "there are no updates"

    def bears(self, count: int) -> int:
        """How many hostile updates among `count` the rule can leave aside."""
        return 0

    def clashes(self, experiment: "Experiment") -> Iterator[str]:
        mode, federation = experiment.privacy.aggregation, experiment.federation
        if mode != "plain":
            yield (
                f"federation.aggregator: {self.kind} compares single updates, and privacy.aggregation: {mode} lets the server "
                "see only their sum. Choose one of the two"
            )
        if experiment.privacy.dp is not None:
            yield f"privacy.dp knows what one client can do to a sum, not to federation.aggregator: {self.kind}. Use mean"
        if experiment.own_masks or (federation is not None and federation.tiered):
            cause = "mask.scope: client" if experiment.own_masks else "federation.devices with a density below 1"
            yield (
                f"federation.aggregator: {self.kind} compares whole updates, but clients train different weights ({cause}). "
                "Use one mask for all, or mean"
            )


class MeanOfUpdates(AggregatorChoice):
    """the mean, by `federation.weighting`"""

    word = "mean"

    def clashes(self, experiment: "Experiment") -> Iterator[str]:
        yield from ()


class Robust(AggregatorChoice):
    mix: Count | None = setting(None, "hostile clients a round; updates first become means of near ones")

    @property
    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in super().fields.items() if name != "mix"}

    def refuse(self, count: int) -> Iterator[str]:
        yield from super().refuse(count)
        if self.mix is not None and count < 2 * self.mix + 1:
            yield (
                f"mix = {self.mix} hostile clients take at least 2 mix + 1 = {2 * self.mix + 1} updates: the honest ones must "
                f"be more. With {count} mix up to {(count - 1) // 2} works"
            )

    def bears(self, count: int) -> int:
        return (count - 1) // 2 if self.mix is None else self.mix


class Median(Robust):
    """the median of each value"""

    word, home = "median", "fedsieve.federation.aggregators:median"


def dropped(share: float, count: int) -> int:
    """How many of `count` updates a trimmed mean leaves out at either end."""
    return ceil(share * count - 1e-9)  # 0.1 * 30 is a little more than 3


class TrimmedMean(Robust):
    """the mean of each value without a `share` of the clients at either end"""

    word, home = "trimmed_mean", "fedsieve.federation.aggregators:trimmed_mean"

    share: Annotated[float, Field(ge=0, lt=0.5)] = setting(0.2, "of the clients, left out at either end")

    def refuse(self, count: int) -> Iterator[str]:
        yield from super().refuse(count)
        if count and 2 * dropped(self.share, count) >= count:
            yield (
                f"share {self.share:g} leaves out {dropped(self.share, count)} of {count} updates at either end, so that none is left. "
                f"With {count} updates a share up to {floor(100 * ((count - 1) // 2) / count) / 100:g} works; median leaves out "
                "the most"
            )

    def bears(self, count: int) -> int:
        return min(super().bears(count), dropped(self.share, count))


class Krum(Robust):
    """the one update that lies nearest to the others, where `f` may be hostile"""

    word, home = "krum", "fedsieve.federation.aggregators:krum"

    f: Count = setting(1, "how many clients of a round may be hostile")

    def refuse(self, count: int) -> Iterator[str]:
        yield from super().refuse(count)
        if count < 2 * self.f + 3:
            works = f"f up to {(count - 3) // 2} works" if count >= 3 else "neither krum nor multi_krum works"
            yield (
                f"f = {self.f} hostile clients take at least 2 f + 3 = {2 * self.f + 3} updates. With {count} {works}; median "
                "takes any number"
            )

    def bears(self, count: int) -> int:
        return min(super().bears(count), self.f)


class MultiKrum(Krum):
    """the mean of the `m` (default: all but `f`) updates that Krum ranks first"""

    word, home = "multi_krum", "fedsieve.federation.aggregators:multi_krum"

    m: Positive | None = setting(None, "how many updates are averaged; default: all but f")

    def refuse(self, count: int) -> Iterator[str]:
        yield from super().refuse(count)
        if not 1 <= (self.m or 1) <= count - self.f:
            yield (
                f"m = {self.m} of {count} updates would take in some of the f = {self.f} hostile ones. m from 1 to "
                f"{count - self.f} works"
            )

    def bears(self, count: int) -> int:
        return min(Robust.bears(self, count), count - (self.m or count - self.f))


class GeometricMedian(Robust):
    """the point with the least mean distance to all updates"""

    word, home = "geometric_median", "fedsieve.federation.aggregators:geometric_median"


class NormBound(Robust):
    """the mean of updates shortened to a norm: `limit`, or the median of the round's"""

    word, home = "norm_bound", "fedsieve.federation.aggregators:norm_bound"

    limit: Rate | None = setting(None, "the largest norm; default: the median of a round's")

    def bears(self, count: int) -> int:
        return 0  # it only shortens them


# --- masks -----------------------------------------------------------------------------------------------------------

Evidence = Literal["weights", "fisher", "gradient"]


class Rule(Choice):
    """Which weights may train: those at one end of a score."""

    family, place, bare = "rule", "mask.rule", True
    evidence: ClassVar[tuple[Evidence, ...]] = ("fisher",)  # what the rule looks at
    lowest: ClassVar[bool] = False  # whether the lowest scores train
    combines: ClassVar[bool] = False  # takes mask.alpha and mask.scale

    @property
    def sums(self) -> list[str]:
        """The evidence that needs examples: across clients each costs a sum in every calibration round."""
        return [one for one in self.evidence if one != "weights"]

    @property
    def scored(self) -> bool:
        """Whether the rule looks at clients' examples, and not only at weights."""
        return bool(self.sums)

    @property
    def basis(self) -> str:
        """What the scores are made of, in a word."""
        words = {("weights",): "magnitude", ("weights", "fisher"): "hybrid", (): "random"}
        return words.get(self.evidence, self.evidence[-1] if self.evidence else "")


class LeastSensitive(Rule):
    """trains the weights the output depends on least (lowest Fisher score)"""

    word, home, lowest = "least_sensitive", "fedsieve.mask.rules:sensitivity", True


class MostSensitive(Rule):
    """trains the weights the output depends on most (highest Fisher score)"""

    word, home = "most_sensitive", "fedsieve.mask.rules:sensitivity"


class LowMagnitude(Rule):
    """trains the smallest weights (lowest |w|)"""

    word, home, lowest, evidence = "low_magnitude", "fedsieve.mask.rules:size", True, ("weights",)


class HighMagnitude(Rule):
    """trains the largest weights (highest |w|)"""

    word, home, evidence = "high_magnitude", "fedsieve.mask.rules:size", ("weights",)


class LowHybrid(Rule):
    """trains the weights lowest in Fisher score and |w| together"""

    word, home, lowest, combines = "low_hybrid", "fedsieve.mask.rules:hybrid", True, True
    evidence = ("weights", "fisher")


class HighHybrid(Rule):
    """trains the weights highest in Fisher score and |w| together"""

    word, home, combines = "high_hybrid", "fedsieve.mask.rules:hybrid", True
    evidence = ("weights", "fisher")


class LargestGradient(Rule):
    """trains the weights with the largest gradient |g| (SIFT, GPS)"""

    word, home, evidence = "gradient", "fedsieve.mask.rules:gradient", ("gradient",)


class Saliency(Rule):
    """trains the weights with the largest |g w| (SNIP, SSFL)"""

    word, home, evidence = "saliency", "fedsieve.mask.rules:saliency", ("weights", "gradient")


class Given(Rule):
    """trains the weights of a finished mask: `mask.file`, or an `fs.Mask` in Python"""

    word, evidence = "given", ("weights",)


class AtRandom(Rule):
    """trains weights drawn at random, whatever the model"""

    word, home, lowest, evidence = "random", "fedsieve.mask.rules:at_random", True, ()


# --- losses ----------------------------------------------------------------------------------------------------------


class ObjectiveChoice(Choice):
    """What training lowers: the loss of each example."""

    family, place, default = "objective", "stages.objective", "cross_entropy"


class CrossEntropy(ObjectiveChoice):
    """cross-entropy of classes, the last axis of the outputs; `label_smoothing` spreads a share over all classes"""

    word, home = "cross_entropy", "fedsieve.train.objectives:cross_entropy"

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @property
    def fields(self) -> dict[str, Any]:
        return {"smoothing": self.label_smoothing} if self.label_smoothing else {}


class MeanSquaredError(ObjectiveChoice):
    """the squared distance of outputs and labels"""

    word, home = "mean_squared_error", "fedsieve.train.objectives:mean_squared_error"


# --- trackers --------------------------------------------------------------------------------------------------------


class TrackerChoice(Choice):
    """Where metrics go in addition to metrics.jsonl."""

    family, place, bare = "tracker", "tracking", True


class TensorBoard(TrackerChoice):
    """event files in the run folder"""

    word, home = "tensorboard", "fedsieve.runner.tracking:TensorBoardTracker"


class Wandb(TrackerChoice):
    """Weights & Biases; needs fedsieve[wandb]"""

    word, home = "wandb", "fedsieve.runner.tracking:WandbTracker"


class Mlflow(TrackerChoice):
    """MLflow; needs fedsieve[mlflow]"""

    word, home = "mlflow", "fedsieve.runner.tracking:MLflowTracker"
