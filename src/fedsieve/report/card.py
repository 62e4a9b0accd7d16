"""The model card of an export: what a run folder records of its model, in Markdown (Mitchell et al. 2019)."""

from typing import Any

from fedsieve.report.folder import RunFolder
from fedsieve.report.html import render
from fedsieve.report.traffic import of_dense, read_traffic


def describe_run(run: RunFolder, fingerprint: str | None) -> str:
    """The results, data, training, bytes and privacy of a finished run, for the card of its model.

    `fingerprint` is that of the training images, where a checkpoint still has it.
    """
    settings = run.experiment
    whole = run.summary is not None and run.torn is None and settings.federation is not None
    return render(
        "run.md",
        run=run,
        settings=settings,
        summary=run.summary,
        stages=[(stage, stage.model_dump(mode="json")["train"], _ended(run, stage.name)) for stage in settings.stages],
        fingerprint=fingerprint,
        share=of_dense(read_traffic(run)) if whole else None,
        problems=list(dict.fromkeys([*run.problems, *([run.torn] if run.torn else [])])),
    )


def _ended(run: RunFolder, stage: str) -> Any:
    return run.summary.stages.get(stage) if run.summary else None


def model_card(title: str, library: str, record: str, **sections: Any) -> str:
    """The card of one exported file: the `record` of its run, its input, how it is loaded, and all settings."""
    return render("card.md", title=title, library=library, record=record, **sections)
