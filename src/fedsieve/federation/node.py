"""A node: one client of a federation, where its images are. It answers what a server elsewhere asks.

It is `LocalClients` of one behind an envelope, with memory on its own disk and a log of what leaves it.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsieve.config import PersonalMethod, Stage
from fedsieve.errors import FedsieveError
from fedsieve.federation.asks import METRICS, Losses, Metrics, Scores, Statistics
from fedsieve.federation.calibrate import Calibration, sieve_at, unscored
from fedsieve.federation.channel import EXACT, FP64, STATISTICS, Channel, Parcel, Tally
from fedsieve.federation.clients import Ask, NotFinite, SecretSum, Worked
from fedsieve.federation.executors import Task
from fedsieve.federation.least_squares import head_space
from fedsieve.federation.local import LocalClients, Training
from fedsieve.federation.maskbook import MaskBook, bits_of
from fedsieve.federation.memory import ClientMemory
from fedsieve.federation.parts import client_parts
from fedsieve.federation.personal import PersonalModels
from fedsieve.federation.remote import SUM, effort_space, personal_space
from fedsieve.federation.secure import ASTRAY, Inputs, Kept
from fedsieve.federation.sent import note
from fedsieve.federation.state import Context, MaskState
from fedsieve.files import write_atomic
from fedsieve.mask.mask import Mask
from fedsieve.model.build import Classifier, OnFeatures, trainable_names
from fedsieve.model.space import ParamSpace
from fedsieve.privacy.secagg import OVERHEAD, PHASES, SumClient, threshold_of
from fedsieve.train.feed import Examples, with_features
from fedsieve.train.loop import EVALUATION_BATCH, predict
from fedsieve.train.modes import RunningStatistics
from fedsieve.train.sieve import starting_mask
from fedsieve.wire.codec import Coding
from fedsieve.wire.envelope import wrap

# Names in a node's memory that no other client has.
CONTEXT, RECEIVED, SCORED, SECRET, MASK = "context", "received", "scored", "secret", "mask."

ADDRESS = ("run", "client", "ask", "stage", "round")  # of a question, and of its answer
LEAST = 3  # clients in a secure sum: of two, each would learn what the other sent
REVEALED = 1000  # sums that a node remembers to have been in


class Problem(FedsieveError):
    """The reason why a node cannot answer, of a kind that the server knows."""

    kind = ""


class LostMemory(Problem):
    """The node lacks memory that the server counts on."""

    kind = "memory"


class Astray(Problem):
    """The values that the node would send are not finite."""

    kind = ASTRAY


class Outbox:
    """Messages that are to leave a node, and their lines in its log."""

    def __init__(self) -> None:
        self.messages: dict[str, bytes | memoryview] = {}
        self.notes: list[dict[str, Any]] = []

    def keep(self, parcel: Parcel, messages: Sequence[memoryview], ns: Sequence[int]) -> None:
        """Take up a message as it is sealed."""
        (self.messages[parcel.what],) = messages
        mask = {"mask": parcel.over.mask_id, "encloses_mask": parcel.enclose}
        size, values = len(messages[0]), parcel.over.count
        self.notes.append({"what": parcel.what, "bytes": size, "values": values, **mask, "n": ns[0]})


class NodeMemory:
    """The memory of a node for one stage, in the version that the server names."""

    def __init__(self, node: "Node", space: ParamSpace, stage: str, version: int) -> None:
        """`version` is below zero after an update that was refused."""
        self.client, self.space, self.stage, self.version = node.client, space, stage, version
        self.device = node.context.train.labels.device
        try:
            versions = {str(self.client): abs(version)} if version else None
            self.store = ClientMemory(node.folder / "memory" / stage, versions)
            self.store.settle(self.client, 0, taken=version > 0)
        except FedsieveError as error:
            raise LostMemory(f"version {version} of its memory of stage {stage} is lost: {error}") from None

    def get(self) -> dict[str, Tensor]:
        """All of it, on the device that trains."""
        return self.store.get(self.client, self.device)

    def put(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Add to it."""
        self.store.put(self.client, round, **tensors)

    def put_masks(self, round: int, *masks: Mask | None) -> None:
        """Add masks of the stage, which `mask` finds by their ids."""
        self.put(round, {f"{MASK}{mask.id}": bits_of(mask) for mask in masks if mask is not None})

    def mask(self, name: str) -> Mask:
        """A mask of the stage by its id: one that was sent, or that the node drew for itself."""
        if (bits := self.get().get(f"{MASK}{name}")) is not None:
            return Mask(self.space, bits.cpu().numpy())
        raise LostMemory(f"it does not know the mask {name} of stage {self.stage}")

    def tidy(self, masks: Collection[str | None]) -> None:
        """Forget this round's weights, and all masks but these: no later question needs them."""
        used = {f"{MASK}{name}" for name in masks}
        old = [
            name
            for name in self.store.get(self.client)
            if (name.startswith(MASK) and name not in used) or name.startswith((RECEIVED, SCORED, SECRET))
        ]
        if old:
            self.store.drop(self.client, old)

    def write(self, versions: int) -> int:
        """Write what is new to the disk, give its version, and keep `versions` versions before it."""
        written = self.store.write(abs(self.version) + 1).get(str(self.client), 0)
        self.store.prune([{str(self.client): number} for number in range(written - versions, written + 1)])
        return written


class Node:
    """Client number `client`, whose images are `context.train`, and at the end `test`; its files are in `folder`."""

    def __init__(self, context: Context, client: int, folder: Path, test: Callable[[], Examples]) -> None:
        self.context, self.client, self.folder, self.test = context, client, folder, test
        self.warned: set[str] = set()  # stages in which values of its updates were clipped
        self.stages = {stage.name: stage for stage in context.experiment.stages}
        assert isinstance(context.model, Classifier)
        self.model = context.model
        self.work: dict[str, Callable[[Question], None]] = {
            "train": Question.train,
            "metrics": Question.metrics,
            "scores": Question.scores,
            "statistics": Question.statistics,
            "losses": Question.losses,
            "test": Question.test,
            SUM: Question.sum,
        }

    def answer(self, head: Mapping[str, Any], messages: Sequence[bytes]) -> bytes:
        """The envelope that answers one with this head and these messages."""
        reply: dict[str, Any] = {name: head.get(name) for name in ADDRESS}
        try:
            stage, work = self.stages.get(str(head.get("stage"))), self.work.get(str(head.get("ask")))
            if stage is None or work is None or type(head.get("round")) is not int:
                raise FedsieveError(f"cannot do {head.get('ask')} in stage {head.get('stage')}")
            question = Question(self, stage, head, messages)
            work(question)
            outbox = question.outbox
            reply |= {"memory": question.remember(), "parts": list(outbox.messages)}
        except Problem as error:
            return problem(self.folder, head, str(error), error.kind)
        except NotFinite as error:
            return problem(self.folder, head, str(error), ASTRAY)
        envelope = wrap(reply, list(outbox.messages.values()))
        note(self.folder, head, outbox.notes, len(envelope))
        return envelope


def problem(folder: Path, head: Mapping[str, Any], sentence: str, kind: str) -> bytes:
    """The envelope that says why a node cannot answer."""
    envelope = wrap({**{name: head.get(name) for name in ADDRESS}, "problem": sentence, "kind": kind})
    note(folder, head, [{"what": "problem", "problem": sentence}], len(envelope))
    return envelope


class Question:
    """One question to a node, with the server's model, the node's memory and its outgoing messages."""

    def __init__(self, node: Node, stage: Stage, head: Mapping[str, Any], messages: Sequence[bytes]) -> None:
        self.node, self.stage, self.head, self.client = node, stage, head, node.client
        self.experiment, self.device = node.context.experiment, node.context.train.labels.device
        self.space = ParamSpace.of(node.model, trainable_names(node.model, stage.train))
        self.memory = NodeMemory(node, self.space, stage.name, int(head.get("memory") or 0))
        self.context = replace(node.context, memory=self.memory.store)
        self.sieve, self.secret = self.experiment.mask_of(stage), self.experiment.privacy.aggregation == "secagg"
        self.outbox = Outbox()
        self.channel = Channel(Tally(None, stage.name), self.experiment.seed, self.device, self.outbox.keep)
        self.inputs = Inputs(self.experiment.privacy, self.experiment.seed, stage.name)
        self.down = Coding(self.experiment.message.down, self.experiment.message.group)
        self.parts: dict[str, bytes] = {}
        self.received = torch.empty(0)  # the server's weights, once they are in the model
        for about, message in zip(head.get("parts") or (), messages, strict=True):
            self._take_up(about, message)
        self._begin()

    def remember(self) -> int:
        """Write new memory to the disk, and give its version."""
        if self.head["ask"] == "test":  # the last question, and of no stage
            return 0
        if self.head["ask"] == SUM:  # which changes nothing that is remembered
            return self.memory.version
        return self.memory.write(self.experiment.checkpoint.keep)

    # --- messages from the server ------------------------------------------------------------------------------------

    def _take_up(self, about: Mapping[str, Any], message: bytes) -> None:
        """Remember a mask, or what earlier stages changed; other messages wait for the work that needs them."""
        number = self.head["round"]
        if about["what"] == "context":
            whole = ParamSpace.of(self.node.model)
            heard = Parcel("context", number, whole, EXACT, enclose=True).open(message, device=self.device)
            assert heard.mask is not None
            self.memory.put(
                self.head["round"], {f"{CONTEXT}.mask": bits_of(heard.mask), f"{CONTEXT}.values": heard.values}
            )
        elif about["what"] == "mask":
            within = None if about["within"] is None else self.memory.mask(about["within"])
            heard = Parcel("mask", number, self.space, enclose=True, within=within).open(message)
            assert heard.mask is not None
            self.memory.put_masks(self.head["round"], heard.mask)
        else:
            self.parts[about["what"]] = message

    def _begin(self) -> None:
        """The model as the stage begins: as every device has it, and what earlier stages changed."""
        model, memory = self.node.model, self.memory.get()
        model.load_state_dict(self.context.initial)
        if f"{CONTEXT}.mask" in memory:
            whole = ParamSpace.of(model)
            mask = Mask(whole, memory[f"{CONTEXT}.mask"].cpu().numpy())
            values = whole.read(model)
            values[mask.indices().to(values.device)] = memory[f"{CONTEXT}.values"].to(values.dtype)
            whole.write(model, values)

    def _clients(self) -> LocalClients:
        """The node's one client, with the masks that the server names in use and the server's weights in the model."""
        model, head = self.node.model, self.head
        forward: nn.Module = model
        feed = self.context.train
        if self.stage.train == "head" and not feed.random:
            feed, forward = self._features(), OnFeatures(model.head)
        theta, correction = self.space.bind(model), self.context.population.settings.correction
        task = Task(
            forward,
            self.space,
            theta,
            feed,
            self.stage.optimizer,
            correction,
            self.context.autocast,
            self.context.speed,
            self.context.recipe,
        )
        book = self._book(theta)
        parts = client_parts(self.context, book)
        training = Training(self.context, self.stage, task, book, parts, at_once=1)
        clients = LocalClients(self.context, self.stage.name, feed, self.channel, training, final=False)
        clients.call([self.client], head["round"])
        if (message := self.parts.get("model")) is not None:
            parcel = Parcel("model", head["round"], book.moved or self.space, self.down)
            self.received = parcel.open(message, device=self.device).values
        elif (kept := self.memory.get().get(RECEIVED)) is not None:
            self.received = kept
        else:
            raise LostMemory(f"it does not have the weights of round {head['round'] + 1}")
        book.lay(self.received, self.down, theta)
        if (message := self.parts.get(STATISTICS)) is not None:
            running = RunningStatistics(model)
            parcel = Parcel(STATISTICS, head["round"], running.space, EXACT)
            running.write(parcel.open(message, device=self.device).values)
            clients.hear(STATISTICS, running.read(), head["round"])
        return clients

    def _book(self, theta: Tensor) -> MaskBook:
        """The masks that the server names. Those that are drawn at random are not sent: all draw the same."""
        head, tier = self.head, self.head["tier"]
        if self.sieve and not self.sieve.rule.evidence and self.sieve.scope != "client":
            self._draw_masks(theta)
        mask, moved = (bits_of(self.memory.mask(head[name])) if head[name] else None for name in ("mask", "moved"))
        given = [self.client] if head["given"] else []
        state = MaskState(mask, moved, generation=head["generation"], given=given)
        book = MaskBook(self.context, self.stage, self.space, theta, state)
        if tier is not None:
            book.set_tier(self.client, self.memory.mask(tier))
        return book

    def _draw_masks(self, theta: Tensor) -> None:
        """Draw the newest mask that all draw alike, and all before it."""
        if self.head["mask"] is None or f"{MASK}{self.head['mask']}" in self.memory.get():
            return
        assert self.sieve is not None
        book = MaskBook(self.context, self.stage, self.space, theta, MaskState())
        for generation in range(self.head["generation"]):
            sieve = sieve_at(self.sieve, generation, self.stage.length)
            calibration = Calibration(self.context, self.stage.name, self.space, sieve, generation)
            book.renew(*calibration.mask(unscored))
        self.memory.put_masks(self.head["round"], book.mask, book.moved, book.tier(self.client))

    # --- work --------------------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train, and send the update. The next question says whether the server accepted it."""
        clients = self._clients()
        if (message := self.parts.get("control")) is not None:
            over = clients.training.book.trains
            parcel = Parcel("control", self.head["round"], over, self.down)
            clients.hear("control", parcel.open(message, device=self.device).values, self.head["round"])
        for reply in clients.train([self.client], self.head["round"], float(self.head["lr"])):
            if isinstance(reply, Worked) and not self.secret:
                self._say_effort(clients, reply)
        self.memory.tidy([self.head[name] for name in ("moved", "mask", "tier")])
        if self.secret:
            self._keep(clients.rows[self.client])

    def _say_effort(self, clients: LocalClients, worked: Worked) -> None:
        """Report on training: loss, correct answers, images, and how far each block's weights moved."""
        spans = clients.training.book.spans
        squares, over = worked.squares[:, 0], effort_space(spans, self.context.recipe)
        values = over.flatten({"sums": worked.sums[0].cpu(), "squares": squares})
        self.channel.up(Parcel("effort", self.head["round"], over, FP64), [self.client], values[None], [0])
        loss, *correct, images = worked.sums[0].tolist()
        drift = {name: square**0.5 for (name, _, _), square in zip(spans, squares.tolist(), strict=True)}
        self.outbox.notes[-1]["metrics"] = {"loss": loss, "images": images, "drift": drift}
        if correct:
            self.outbox.notes[-1]["metrics"]["correct"] = correct[0]

    def metrics(self) -> None:
        """Measure the server's weights on images that the node never trains on, and keep them for its own round."""
        self._answer(Metrics(self.head["round"], self.context.recipe), self._clients())
        self.memory.put(self.head["round"], {RECEIVED: self.received})

    def scores(self) -> None:
        """Score the weights that are still active, for a mask that all clients share."""
        head, address = self.head, tuple(self.head["address"])
        assert self.sieve is not None
        sieve = sieve_at(self.sieve, address[1] if address[1:] else 0, self.stage.length)
        theta = self.space.bind(self.node.model)
        if (message := self.parts.get("model")) is not None:
            parcel = Parcel("model", head["round"], self.space, EXACT, enclose=True)
            heard = parcel.open(message, device=self.device)
            assert heard.mask is not None
            self.memory.put(
                self.head["round"], {f"{SCORED}.values": heard.values, f"{SCORED}.mask": bits_of(heard.mask)}
            )
        memory = self.memory.get()
        if f"{SCORED}.mask" in memory:
            places = Mask(self.space, memory[f"{SCORED}.mask"].cpu().numpy()).indices()
            with torch.no_grad():
                theta[places.to(theta.device)] = memory[f"{SCORED}.values"].to(theta.dtype)
        active = starting_mask(sieve, self.node.model, self.space)
        if active.id != head["over"]:
            active = self.memory.mask(head["over"])
        self._answer(Scores(head["round"], head["evidence"], sieve, active, head["number"], head["among"], address))
        # The next question of this calibration sends its mask within this one.
        self.memory.put_masks(self.head["round"], active)

    def statistics(self) -> None:
        """Send the statistics of a head in closed form: sums of products of features and labels."""
        classes, width = self.space.shapes[self.space.names.index("head.weight")]
        self._answer(Statistics(width, classes), self._on_features())

    def losses(self) -> None:
        """Send the losses of a head at a grid of scales."""
        classes, width = self.space.shapes[self.space.names.index("head.weight")]
        parcel = Parcel("head", self.head["round"], head_space(width, classes), EXACT)
        head = parcel.open(self.parts["head"], device=self.device).values
        self._answer(Losses(head, classes), self._on_features())

    def test(self) -> None:
        """Measure the final model, and the node's personal models, on test images."""
        feed, number = self.node.test(), self.head["round"]
        if self.experiment.own_images:
            logits = predict(self.node.model, feed, self.context.autocast).double()
            correct = (logits.argmax(1) == feed.labels).sum()
            values = torch.stack([F.cross_entropy(logits, feed.labels, reduction="sum"), correct.double()])
            self.channel.up(Parcel("test", number, METRICS, FP64), [self.client], values[None], [len(feed)])
        personal = self.context.population.settings.personal
        if personal and self.head["personal"]:
            mask = None if self.head["mask"] is None else self.memory.mask(self.head["mask"])
            models = PersonalModels(self.context, np.array([self.client]), mask, feed, self._save_model)
            accuracy = torch.tensor([[models.accuracies(method)[0] for method in personal.methods]])
            over = personal_space(len(personal.methods))
            self.channel.up(Parcel("personal", number, over, FP64), [self.client], accuracy.nan_to_num(-1.0), [0])

    def _save_model(self, method: PersonalMethod) -> None:
        """Keep a personal model in a file of the node's own."""
        file = self.node.folder / "personal" / f"{method}.safetensors"
        write_atomic(file, safetensors.torch.save(self.node.model.state_dict()))

    def _on_features(self) -> LocalClients:
        """The node's one client with features instead of images."""
        return LocalClients(self.context, self.stage.name, self._features(), self.channel)

    def _features(self) -> Examples:
        """All images as features of the backbone as it is."""
        return with_features(self.context.train, self.node.model.backbone, EVALUATION_BATCH, self.context.autocast)

    def _answer(self, ask: Ask, clients: LocalClients | None = None) -> None:
        """Answer a question. Under secure sums the answer stays here for now."""
        clients = clients or LocalClients(self.context, self.stage.name, self.context.train, self.channel)
        if self.secret:
            clients.keep(ask, [self.client], needed=True)
            self._keep(clients.rows[self.client])
        else:
            list(clients.answers(ask, [self.client], needed=True))

    # --- secure sums -------------------------------------------------------------------------------------------------

    def _keep(self, kept: Kept) -> None:
        """Keep values for the questions of a secure sum."""
        if not bool(np.isfinite(kept.row).all()):
            raise Astray("what it would send is not finite")
        row, sizes = torch.from_numpy(kept.row), torch.tensor(list(kept.sizes), dtype=torch.int64)
        self.memory.put(self.head["round"], {f"{SECRET}.row": row, f"{SECRET}.sizes": sizes})

    def sum(self) -> None:
        """Take part in one phase of a secure sum of the kept values."""
        head, memory = self.head, self.memory.store.get(self.client)
        if f"{SECRET}.row" not in memory:
            raise LostMemory(f"it has nothing to add to a sum of {head['sum']}")
        kept = Kept(
            memory[f"{SECRET}.row"].numpy(),
            memory[f"{SECRET}.sizes"].tolist(),
            int(self.context.population.weights[self.client]),
        )
        what, count, file = str(head["sum"]), int(head["clients"]), self.node.folder / "memory" / "sum.json"
        if count < LEAST:
            raise FedsieveError(f"a secure sum of {count} clients hides nothing: {LEAST} at least")
        threshold = threshold_of(self.experiment.privacy.threshold, count)
        secret = SecretSum(what, head["round"], range(count), self.experiment.privacy.bits, 0, threshold, head)
        client = SumClient(self.client, self.inputs.of(secret, self.client, kept), head["round"], threshold)
        if head["phase"]:
            if not file.exists():
                raise LostMemory("it has lost the keys of the secure sum that is under way")
            client.restore(json.loads(file.read_text()))
        if PHASES[client.phase] == "reveal":
            self._commit(what, kept.row, self.parts[SUM])
        answer = client.reply(self.parts[SUM])
        write_atomic(file, json.dumps(client.state()), private=True)
        self.outbox.messages[SUM] = answer
        phase = PHASES[client.phase - 1]
        entry = {"what": f"{what}.{phase}", "bytes": len(answer), "mask": head.get("mask")}
        if what == "update" and phase == "pad":
            entry["clipped"] = self.inputs.clipped
            if self.inputs.clipped and self.stage.name not in self.node.warned:
                self.node.warned.add(self.stage.name)
                self.inputs.warn(f"site {self.client}: ")
        self.outbox.notes.append(entry)

    def _commit(self, what: str, row: np.ndarray, message: bytes) -> None:
        """Refuse to reveal the same values in a second sum: the difference of both would show what each node sent."""
        file = self.node.folder / "revealed.json"
        seen = json.loads(file.read_text()) if file.exists() else {}
        mine = hashlib.blake2b(what.encode() + row.tobytes(), digest_size=16).hexdigest()
        those = hashlib.blake2b(message[OVERHEAD:], digest_size=16).hexdigest()
        if seen.setdefault(mine, those) != those:
            raise FedsieveError("the same values were in a sum with other sites before: a second sum would show them")
        write_atomic(file, json.dumps(dict(list(seen.items())[-REVEALED:])))
