"""A site: one client of a federation, where its images are. It answers what a server elsewhere asks.

It runs the client's half of the round loop on its own images, keeps its memory on its own disk, and notes what leaves it.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsieve.config import PersonalMethod, Privacy, Stage
from fedsieve.errors import FedsieveError
from fedsieve.federation.calibrate import client_scores, one_mask, scored_rows, sieve_at
from fedsieve.federation.channel import EXACT, NO_VALUES, Channel
from fedsieve.federation.executors import Trained
from fedsieve.federation.personal import PersonalModels
from fedsieve.federation.remote import SUM, effort_space, personal_space
from fedsieve.federation.ridge import LOSSES, head_space, losses_at_scales, statistics, statistics_space
from fedsieve.federation.rounds import FP64, METRICS, Effort, Federated, squares_by_span
from fedsieve.federation.secure import (
    ASTRAY,
    clipping,
    point_at,
    scale_input,
    scaled_input,
    update_input,
    update_point,
)
from fedsieve.federation.state import Context
from fedsieve.federation.store import ClientStore
from fedsieve.files import write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.model.build import Classifier, OnFeatures, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.secagg import OVERHEAD, PHASES, Client, threshold_of
from fedsieve.train.feed import Feed, with_features
from fedsieve.train.loop import EVALUATION_BATCH, predict
from fedsieve.train.sieve import starting_mask
from fedsieve.wire.codec import Coding, Message, decode
from fedsieve.wire.envelope import wrap

# What a site remembers beside what any client does.
CONTEXT, RECEIVED, SCORED, SECRET, MASK = "context", "received", "scored", "secret", "mask."

ADDRESS = ("run", "client", "ask", "stage", "round")  # of a question, and of its answer
LEAST = 3  # clients in a secure sum: of two, each would learn what the other sent
REVEALED = 1000  # sums that a site remembers to have been in


class Problem(FedsieveError):
    """Why a site cannot answer, of a kind that the server knows."""

    kind = ""


class LostMemory(Problem):
    """The site does not remember what the server counts on."""

    kind = "memory"


class Astray(Problem):
    """What the site would send is not finite."""

    kind = ASTRAY


class Outbox(Channel):
    """The wire as a site sees it: what goes up is kept, to be sent, and noted."""

    def __init__(self, seed: int, stage: str, device: torch.device | str, privacy: Privacy) -> None:
        super().__init__(None, seed, stage, device, privacy)
        self.messages: dict[str, bytes | memoryview] = {}
        self.notes: list[dict[str, Any]] = []

    def encoded(
        self,
        what: str,
        clients: Sequence[int],
        round: int,
        over: Mask | ParamSpace,
        values: Tensor,
        coding: Coding,
        ns: Sequence[int],
        enclose: bool,
    ) -> list[memoryview]:
        messages = super().encoded(what, clients, round, over, values, coding, ns, enclose)
        (self.messages[what],) = messages
        mask = {"mask": over.id if isinstance(over, Mask) else None, "encloses_mask": enclose}
        self.notes.append({"what": what, "bytes": len(messages[0]), "values": values.shape[1], **mask, "n": ns[0]})
        return messages


class Site:
    """Client number `client`, whose images are `context.train`, and at the end `test`; its files are in `folder`."""

    def __init__(self, context: Context, client: int, folder: Path, test: Callable[[], Feed]) -> None:
        self.context, self.client, self.folder, self.test = context, client, folder, test
        self.clips: set[str] = set()  # stages in which values of its updates were clipped
        self.stages = {stage.name: stage for stage in context.experiment.stages}
        assert isinstance(context.model, Classifier)
        self.model = context.model
        self.answers: dict[str, Callable[[Visit], None]] = {
            "train": Visit.train,
            "metrics": Visit.metrics,
            "scores": Visit.scores,
            "statistics": Visit.statistics,
            "losses": Visit.losses,
            "test": Visit.test,
            SUM: Visit.sum,
        }

    def answer(self, head: Mapping[str, Any], messages: Sequence[bytes]) -> bytes:
        """The envelope that answers one with this head and these messages."""
        reply: dict[str, Any] = {name: head.get(name) for name in ADDRESS}
        try:
            stage, work = self.stages.get(str(head.get("stage"))), self.answers.get(str(head.get("ask")))
            if stage is None or work is None or type(head.get("round")) is not int:
                raise FedsieveError(f"cannot do {head.get('ask')} in stage {head.get('stage')}")
            visit = Visit(self, stage, head, messages)
            work(visit)
            reply |= {"memory": visit.remember(), "parts": list(visit.outbox.messages)}
            found, notes = list(visit.outbox.messages.values()), visit.outbox.notes
        except Problem as error:
            return problem(self.folder, head, str(error), error.kind)
        envelope = wrap(reply, found)
        note(self.folder, head, notes, len(envelope))
        return envelope


def note(folder: Path, head: Mapping[str, Any], notes: Sequence[Mapping[str, Any]], size: int) -> None:
    """Write down what leaves a site, before it does: one line for every message, and one for the envelope of them all."""
    about: dict[str, Any] = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
    about |= {name: head.get(name) for name in ("run", "ask", "stage")}
    about["round"] = head["round"] + 1 if type(head.get("round")) is int else None
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "sent.jsonl").open("a") as log:
        for entry in (*notes, {"what": "envelope", "bytes": size}):
            log.write(json.dumps({**about, **entry}) + "\n")


def problem(folder: Path, head: Mapping[str, Any], sentence: str, kind: str) -> bytes:
    """The envelope that says why a site cannot answer."""
    envelope = wrap({**{name: head.get(name) for name in ADDRESS}, "problem": sentence, "kind": kind})
    note(folder, head, [{"what": "problem", "problem": sentence}], len(envelope))
    return envelope


class OwnModels(PersonalModels):
    """Personal models of one site, which stay in a folder of its own."""

    folder: Path

    def accuracies(self, method: PersonalMethod) -> np.ndarray:
        self.file = self.folder / f"{method}.safetensors"
        return super().accuracies(method)

    def _accuracy(self, client: int, test: Feed) -> float:
        write_atomic(self.file, safetensors.torch.save(self.model.state_dict()))
        return super()._accuracy(client, test)


class Visit:
    """One question to a site: the model as the server wants it, what the site remembers, and what it will send."""

    def __init__(self, site: Site, stage: Stage, head: Mapping[str, Any], messages: Sequence[bytes]) -> None:
        self.site, self.stage, self.head, self.client = site, stage, head, site.client
        self.context, self.experiment = site.context, site.context.experiment
        self.sieve, self.secret = self.experiment.mask_of(stage), self.experiment.privacy.aggregation == "secagg"
        self.parts: dict[str, bytes] = {}
        self.store = self.context.store = self._memory(int(head.get("memory") or 0))
        self.outbox = Outbox(
            self.experiment.seed, stage.name, self.context.train.labels.device, self.experiment.privacy
        )
        self.space = ParamSpace.of(site.model, trainable_names(site.model, stage.train))
        for about, message in zip(head.get("parts") or (), messages, strict=True):
            if about["what"] == "context":
                heard = self._heard(message, EXACT, ParamSpace.of(site.model), enclosed=True)
                assert heard.mask is not None
                self._put({f"{CONTEXT}.mask": heard.mask, f"{CONTEXT}.values": heard.values})
            elif about["what"] == "mask":
                within = None if about["within"] is None else self._mask(about["within"])
                heard = self._heard(message, NO_VALUES, self.space, enclosed=True, within=within)
                assert heard.mask is not None
                self._put({f"{MASK}{heard.mask.id}": heard.mask})
            else:
                self.parts[about["what"]] = message
        self._begin()

    # --- memory ------------------------------------------------------------------------------------------------------

    def _memory(self, version: int) -> ClientStore:
        """What the site remembers of a stage, in the version that the server names; below zero, after a refusal."""
        folder = self.site.folder / "memory" / self.stage.name
        versions = {str(self.client): abs(version)} if version else None
        if version < 0 and (folder / "refused" / str(self.client) / f"{-version:08d}.state").exists():
            store = ClientStore(folder / "refused", versions)
            found = ClientStore(folder)
            found.put(self.client, 0, **store.get(self.client))
            found.versions = {self.client: -version}
            return found
        try:
            store = ClientStore(folder, versions)
            store.get(self.client)
        except FedsieveError as error:
            raise LostMemory(f"version {version} of its memory of stage {self.stage.name} is lost: {error}") from None
        return store

    def _put(self, content: Mapping[str, Mask | Tensor]) -> None:
        tensors = {
            name: torch.from_numpy(value.bits.copy()) if isinstance(value, Mask) else value
            for name, value in content.items()
        }
        self.store.put(self.client, self.head["round"], **tensors)

    def remember(self) -> int:
        """Bring what is new to the disk, and give its version."""
        if self.head["ask"] == "test":  # the last question, and of no stage
            return 0
        if self.head["ask"] == SUM:  # which changes nothing that is remembered
            return int(self.head.get("memory") or 0)
        before = abs(int(self.head.get("memory") or 0))
        version = self.store.write(before + 1).get(str(self.client), 0)
        kept = range(version - self.experiment.checkpoint.keep, version + 1)
        self.store.prune([{str(self.client): number} for number in kept])
        return version

    # --- what the server sent ----------------------------------------------------------------------------------------

    def _heard(self, message: bytes, coding: Coding, over: Mask | ParamSpace, **expected: Any) -> Message:
        device = self.outbox.device
        return decode(message, coding, over, round=self.head["round"], device=device, **expected)

    def _mask(self, name: str) -> Mask:
        """A mask of the stage by its id: one that was sent, or drawn at random, which the site does for itself."""
        memory = self.store.get(self.client)
        if (bits := memory.get(f"{MASK}{name}")) is not None:
            return Mask(self.space, bits.numpy())
        raise LostMemory(f"it does not know the mask {name} of stage {self.stage.name}")

    def _begin(self) -> None:
        """The model as the stage begins: as every device has it, and what earlier stages changed."""
        site, memory = self.site, self.store.get(self.client, self.outbox.device)
        site.model.load_state_dict(self.context.initial)
        if f"{CONTEXT}.mask" in memory:
            whole = ParamSpace.of(site.model)
            mask = Mask(whole, memory[f"{CONTEXT}.mask"].cpu().numpy())
            values = whole.read(site.model)
            values[mask.indices().to(values.device)] = memory[f"{CONTEXT}.values"].to(values.dtype)
            whole.write(site.model, values)

    def _stage(self) -> Federated:
        """The client's half of the stage, with the masks that the server names in use."""
        context, site, head = self.context, self.site, self.head
        forward: nn.Module = site.model
        feed = context.train
        if self.stage.train == "head" and not feed.transform.random:
            feed, forward = self._features(), OnFeatures(site.model.head)
        theta = self.space.bind(site.model)
        found = Federated(context, self.stage, self.space, forward, theta, feed, dict)
        found.channel = self.outbox
        state = found.state
        state.round, state.generation, state.clients_at_once = head["round"], head["generation"], 1
        state.given = [self.client] if head["given"] else []
        self._draw_masks(found)
        masks = {name: self._mask(head[name]) if head[name] else None for name in ("moved", "mask", "tier")}
        for name in ("mask", "moved"):
            mask = masks[name]
            setattr(state, name, None if mask is None else torch.from_numpy(mask.bits.copy()))
        found._use(masks["mask"])
        if masks["tier"] is not None:
            found.tiers = {found.population.device(self.client).density: masks["tier"]}
        return found

    def _draw_masks(self, stage: Federated) -> None:
        """Masks that are drawn at random are not sent: all draw the same."""
        if stage._mask_travels or self.sieve is None or self.head["mask"] is None:
            return
        if f"{MASK}{self.head['mask']}" in self.store.get(self.client):
            return
        moved = Mask.zeros(self.space)
        for generation in range(self.head["generation"]):
            state = replace(stage.state, generation=generation)
            sieve = sieve_at(self.sieve, generation, stage.length)
            mask, scores = one_mask(self.context, self.outbox, self.space, sieve, state, lambda _: None)
            moved = moved | mask
        found = {"mask": mask, "moved": moved}
        stage.state.ranks = scores[mask.indices()]
        stage.mask = mask
        if (tier := stage._tier(self.client)) is not None:
            found["tier"] = tier
        stage.tiers = {}
        self._put({f"{MASK}{one.id}": one for one in found.values()})

    def _with_model(self) -> Federated:
        """The stage, and the weights of the server laid over the model."""
        stage = self._stage()
        memory = self.store.get(self.client, self.outbox.device)
        if (message := self.parts.get("model")) is not None:
            values = self._heard(message, stage.down, stage.moved or self.space).values
        elif (kept := memory.get(RECEIVED)) is not None:
            values = kept
        else:
            raise LostMemory(f"it does not have the weights of round {self.head['round'] + 1}")
        stage._take_model(values)
        self.received = values
        return stage

    # --- what it does ------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train, and send the update; whether it will be taken, the site hears with the next question."""
        stage, effort = self._with_model(), Effort()
        if (message := self.parts.get("control")) is not None:
            values = self._heard(message, stage.down, stage.mask or self.space).values
            stage.control = stage.state.control = values.to(stage.theta.dtype)
        trained = list(stage._train([self.client], float(self.head["lr"]), effort))
        (_, result) = trained[0]
        if self.secret:
            self._tidy()
            self._keep(stage.mask or self.space, result.moved[0].float(), 0)
            return
        self._say_effort(stage, result)
        if self.experiment.message.error_feedback or result.gradients is not None:
            self._foresee_refusal(stage, trained)
        list(stage._receive(iter(trained), {self.client: "ok"}, {}))
        self._tidy()

    def _tidy(self) -> None:
        """Forget what no later question can need: weights of this round, and masks that are no longer in use."""
        used = {f"{MASK}{self.head[name]}" for name in ("moved", "mask", "tier")}
        old = [
            name
            for name in self.store.get(self.client)
            if (name.startswith(MASK) and name not in used) or name.startswith((RECEIVED, SCORED, SECRET))
        ]
        if old:
            self.store.drop(self.client, old)

    def _say_effort(self, stage: Federated, result: Trained) -> None:
        """What the server shows of training: loss, correct answers, images, and how far each block's weights went."""
        squares = squares_by_span(result.moved, stage._spans)
        over = effort_space(stage._spans)
        values = over.flatten({"sums": result.sums[0], "squares": squares[:, 0]})
        self.outbox.up("effort", [self.client], self.head["round"], over, values[None], FP64, [0])
        loss, correct, images = result.sums[0].tolist()
        drift = {name: square**0.5 for (name, _, _), square in zip(stage._spans, squares[:, 0].tolist(), strict=True)}
        self.outbox.notes[-1]["metrics"] = {"loss": loss, "correct": correct, "images": images, "drift": drift}

    def _foresee_refusal(self, stage: Federated, trained: Sequence[tuple[list[int], Trained]]) -> None:
        """Write down what the site will remember if its update is refused."""
        before, messages, notes = self.store, dict(self.outbox.messages), list(self.outbox.notes)
        self.context.store = other = ClientStore(self.site.folder / "memory" / self.stage.name / "refused")
        other.put(self.client, self.head["round"], **before.get(self.client))
        list(stage._receive(iter(trained), {self.client: "late"}, {}))
        version = abs(int(self.head.get("memory") or 0)) + 1
        other.write(version)
        kept = range(version - self.experiment.checkpoint.keep, version + 1)
        other.prune([{str(self.client): number} for number in kept])
        self.context.store = before
        self.outbox.messages, self.outbox.notes = messages, notes

    def metrics(self) -> None:
        """Measure the server's weights on images that the site never trains on, and keep them for its own round."""
        stage = self._with_model()
        ((_, values, n),) = stage._measured([self.client])
        self._send("metrics", METRICS, values, FP64, n)
        self._put({RECEIVED: self.received})

    def scores(self) -> None:
        """Score the weights that are still active, for a mask that all clients share."""
        head, address = self.head, tuple(self.head["address"])
        assert self.sieve is not None
        sieve = sieve_at(self.sieve, address[1] if address[1:] else 0, self.stage.length)
        theta = self.space.bind(self.site.model)
        memory = self.store.get(self.client, self.outbox.device)
        if (message := self.parts.get("model")) is not None:
            heard = self._heard(message, EXACT, self.space, enclosed=True)
            assert heard.mask is not None
            self._put({f"{SCORED}.values": heard.values, f"{SCORED}.mask": heard.mask})
            memory = self.store.get(self.client, self.outbox.device)
        if f"{SCORED}.mask" in memory:
            places = Mask(self.space, memory[f"{SCORED}.mask"].cpu().numpy()).indices()
            with torch.no_grad():
                theta[places.to(theta.device)] = memory[f"{SCORED}.values"].to(theta.dtype)
        active, number = starting_mask(sieve, self.site.model, self.space), head["number"]
        if active.id != head["over"]:
            active = self._mask(head["over"])
        rows = scored_rows(self.context, self.client, -(-sieve.fisher.samples // head["among"]), *address)
        asked = [(rows, (*address, self.client))]
        ((values, n),) = client_scores(self.context, self.space, sieve, active, number, asked)
        self._send("scores", active, values.float(), EXACT, n)
        # The next question of this calibration sends its mask within this one.
        self._put({f"{MASK}{active.id}": active})

    # --- secure sums -------------------------------------------------------------------------------------------------

    def _send(self, what: str, over: Mask | ParamSpace, values: Tensor, coding: Coding, n: int) -> None:
        """Send values (k,); what is to be summed in secret stays here for now."""
        if self.secret:
            self._keep(over, values, n)
        else:
            self.outbox.up(what, [self.client], self.head["round"], over, values[None], coding, [n])

    def _keep(self, over: Mask | ParamSpace, values: Tensor, n: int) -> None:
        """Keep values, and the sizes of the tensors that they belong to, for the questions of a secure sum."""
        if not bool(values.isfinite().all()):
            raise Astray("what it would send is not finite")
        sizes = list(over.counts().values()) if isinstance(over, Mask) else np.diff(over.offsets).tolist()
        row = torch.cat([values.double().flatten(), torch.tensor([float(n)], dtype=torch.float64)])
        self._put({f"{SECRET}.row": row, f"{SECRET}.sizes": torch.tensor([*filter(None, sizes), 1])})

    def sum(self) -> None:
        """One phase of a secure sum of what the site has kept."""
        head, kept = self.head, self.store.get(self.client)
        if f"{SECRET}.row" not in kept:
            raise LostMemory(f"it has nothing to add to a sum of {head['sum']}")
        row, sizes = kept[f"{SECRET}.row"].numpy(), kept[f"{SECRET}.sizes"].tolist()
        what, count, file = str(head["sum"]), int(head["clients"]), self.site.folder / "memory" / "sum.json"
        if count < LEAST:
            raise FedsieveError(f"a secure sum of {count} clients hides nothing: {LEAST} at least")
        client = Client(
            self.client,
            self._summand(what, count, row, sizes),
            head["round"],
            threshold_of(self.experiment.privacy.threshold, count),
        )
        if head["phase"]:
            if not file.exists():
                raise LostMemory("it has lost the keys of the secure sum that is under way")
            client.restore(json.loads(file.read_text()))
        if PHASES[client.phase] == "reveal":
            self._commit(what, row, self.parts[SUM])
        answer = client.reply(self.parts[SUM])
        write_atomic(file, json.dumps(client.state()), private=True)
        self.outbox.messages[SUM] = answer
        note = {"what": f"{what}.{PHASES[client.phase - 1]}", "bytes": len(answer), "mask": head.get("mask")}
        if what == "update" and PHASES[client.phase - 1] == "pad":
            note["clipped"] = self.outbox.clipped
            if self.outbox.clipped and self.stage.name not in self.site.clips:
                self.site.clips.add(self.stage.name)
                warnings.warn(f"site {self.client}: {clipping(self.outbox)}", stacklevel=2)
        self.outbox.notes.append(note)

    def _summand(self, what: str, count: int, row: np.ndarray, sizes: list[int]) -> np.ndarray:
        """What the site adds to a sum, as integers."""
        head, outbox, number = self.head, self.outbox, self.head["round"]
        if what == "update":
            people, point = self.context.population, update_point(outbox.privacy, count, int(head["weight_bound"]))
            weight = int(people.sizes[self.client]) if people.settings.weighting == "examples" else 1
            return update_input(outbox, number, self.client, row[:-1], weight, point)
        if what.endswith(".scale"):
            return scale_input(row, sizes)
        return scaled_input(outbox, what, number, self.client, row, point_at(count, head["largest"], sizes))

    def _commit(self, what: str, row: np.ndarray, message: bytes) -> None:
        """Refuse to reveal the same values in another sum than before: the difference would show what each site sent."""
        file = self.site.folder / "revealed.json"
        seen = json.loads(file.read_text()) if file.exists() else {}
        mine = hashlib.blake2b(what.encode() + row.tobytes(), digest_size=16).hexdigest()
        those = hashlib.blake2b(message[OVERHEAD:], digest_size=16).hexdigest()
        if seen.setdefault(mine, those) != those:
            raise FedsieveError("the same values were in a sum with other sites before: a second sum would show them")
        write_atomic(file, json.dumps(dict(list(seen.items())[-REVEALED:])))

    # --- heads in closed form, and the end -----------------------------------------------------------------------------

    def statistics(self) -> None:
        """What a head in closed form needs: sums of products of features and labels."""
        phi, labels = self._own()
        classes = self._classes
        over = statistics_space(phi.shape[1], classes)
        values = statistics(phi, labels, classes)
        self._send("statistics", over, values, FP64, len(labels))

    def losses(self) -> None:
        """The losses of a head at a grid of scales."""
        phi, labels = self._own()
        classes = self._classes
        head = self._heard(self.parts["head"], EXACT, head_space(phi.shape[1], classes)).values
        values = losses_at_scales(head, phi, labels, classes)
        self._send("losses", LOSSES, values, FP64, len(labels))

    @property
    def _classes(self) -> int:
        return self.space.shapes[self.space.names.index("head.bias")][0]

    def test(self) -> None:
        """Measure the final model, and what the site makes of it for itself, on test images."""
        feed, number = self.site.test(), self.head["round"]
        if self.experiment.own_images:
            logits = predict(self.site.model, feed, self.context.autocast).double()
            correct = (logits.argmax(1) == feed.labels).sum()
            values = torch.stack([F.cross_entropy(logits, feed.labels, reduction="sum"), correct.double()])
            self.outbox.up("test", [self.client], number, METRICS, values[None], FP64, [len(feed)])
        personal = self.context.population.settings.personal
        if personal and self.head["personal"]:
            mask = None if self.head["mask"] is None else self._mask(self.head["mask"])
            models = OwnModels(self.context, np.array([self.client]), mask, feed)
            models.folder = self.site.folder / "personal"
            accuracy = torch.tensor([[models.accuracies(method)[0] for method in personal.methods]])
            over = personal_space(len(personal.methods))
            self.outbox.up("personal", [self.client], number, over, accuracy.nan_to_num(-1.0), FP64, [0])

    def _own(self) -> tuple[Tensor, Tensor]:
        """The features and labels of the images that the site trains on."""
        feed = self._features()
        assert feed.features is not None
        rows = torch.from_numpy(self.context.population.examples(self.client)).to(feed.labels.device)
        return feed.features[rows], feed.labels[rows]

    def _features(self) -> Feed:
        """All images as features of the backbone as it is."""
        return with_features(self.context.train, self.site.model.backbone, EVALUATION_BATCH, self.context.autocast)
