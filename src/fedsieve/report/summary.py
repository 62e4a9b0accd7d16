"""summary.json: how a run ended. The same classes write it and read it."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from fedsieve.files import write_json

FILE = "summary.json"
Accuracy = Annotated[float, Field(ge=0, le=1)]


class Fields(BaseModel):
    """A part of the summary. Fields that were never set are not written."""

    model_config = ConfigDict(extra="forbid")

    def content(self) -> dict[str, Any]:
        """The fields that were set, in JSON's types."""
        return self.model_dump(exclude_unset=True)

    @classmethod
    def read(cls, content: Any) -> Self:
        """The part with this content; fields of other versions are left out."""
        return cls.model_validate(content, extra="ignore")


class Ending(Fields):
    """How a stage, or the whole run, ended. Accuracies are fractions; val_* are None where nothing was held out."""

    test_accuracy: Accuracy | None = None
    test_loss: float | None = None
    val_accuracy: Accuracy | None = None
    val_loss: float | None = None
    best_at: int | None = None  # the chosen epoch or round of the stage, counted from 1
    seconds: float | None = None
    trained: int | None = None
    # Of a federation:
    rounds: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    sparsity: float | None = None  # of the maskable weights, as asked
    mask_id: str | None = None
    drift: float | None = None
    refused: dict[str, int] = {}  # replies that did not count, by reason


class StageSummary(Ending):
    """How a stage ended."""

    epochs: int | None = None
    client_val_accuracy: float | None = None  # on images that clients hold back
    client_val_loss: float | None = None
    dense: int | None = None  # weights that dense training would send: of the backbone, where LoRA or adapters train
    simulated_seconds: float | None = None
    # Of a sparse stage's mask:
    rule: str | None = None
    scope: str | None = None
    reached_sparsity: float | None = None  # as whole groups allowed
    active: int | None = None
    active_share: float | None = None
    calibration_seconds: float | None = None


class Spread(Fields):
    """How one model, or each client's own, serves some clients: fractions over clients."""

    clients: int | None = None
    mean: float | None = None
    std: float | None = None
    worst_decile: float | None = None
    worst: float | None = None


class ClientSpread(Spread):
    """A spread over all clients, and over those that never trained."""

    strangers: Spread | None = None


class Summary(Ending):
    """How a run ended."""

    name: str | None = None
    seed: int | None = None
    device: str | None = None
    peak_memory: int | None = None  # bytes on a GPU, images included
    images_per_second: float | None = None
    train_images: int | None = None
    val_images: int | None = None
    test_images: int | None = None
    classes: int | None = None
    parameters: int | None = None
    client_accuracy: ClientSpread | None = None  # of the global model
    personal: dict[str, ClientSpread] = {}  # of clients' own models, by method
    privacy: dict[str, Any] = {}
    stages: dict[str, StageSummary] = {}

    @property
    def validation(self) -> float | None:
        """The accuracy that the final weights were chosen by: the server's, or the clients' where it holds no images."""
        last = list(self.stages.values())[-1:]
        return self.val_accuracy if self.val_accuracy is not None or not last else last[0].client_val_accuracy

    def write(self, folder: Path) -> None:
        """Write the summary into a run folder."""
        write_json(folder / FILE, self.content())
