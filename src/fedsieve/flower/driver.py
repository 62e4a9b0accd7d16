"""A site's one process. It fetches the server's messages, answers those of experiments that the site has accepted, and listens
on no port.

Flower's own SuperNode unpacks and runs whatever bundle it receives. This process makes the same requests of Flower's Fleet API
in its place, and the only code that it runs is the installed package.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import httpx
from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, ErrorCode
from flwr.common.serde import fab_from_proto, message_from_proto, message_to_proto, run_from_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node as NodeNumber
from flwr.proto.run_pb2 import GetRunRequest
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.retry import RetryInvoker, exponential
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsieve.errors import FedsieveError, Stopped
from fedsieve.flower.admission import Accepted, Refused, experiment_of
from fedsieve.flower.grid import REFUSED, from_record, to_record
from fedsieve.flower.keys import read_site_key
from fedsieve.flower.site import SiteSettings, read_site
from fedsieve.flower.warm import answer_warm
from fedsieve.wire.envelope import unwrap

POLL = 1.0  # seconds from one look for messages to the next
LONGEST_PAUSE = 20  # seconds from one try to reach the server to the next
NOT_ACTIVATED = 412  # an answer's status

Say = Callable[[str], None]


class RunEnded(FedsieveError):
    """The server has no use for a message any more."""


class FleetClient(FleetHttpClient):
    """Flower's client of its Fleet API, which goes nowhere but to the server."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._client.follow_redirects = False


class Link:
    """A site's connection to the server: the requests of Flower's Fleet API that it needs."""

    def __init__(self, client: FleetClient, node: int) -> None:
        self.client, self.node = client, NodeNumber(node_id=node)

    def receive(self) -> tuple[Message, ObjectTree] | None:
        """The next message, without its content, and what its content consists of."""
        found = self.client.PullMessages(PullMessagesRequest(node=self.node))
        if not found.messages_list:
            return None
        return message_from_proto(found.messages_list[0]), found.message_object_trees[0]

    def experiment(self, run: int) -> str:
        """The experiment of a run, if its bundle is fedsieve's."""
        about = run_from_proto(self.client.GetRun(GetRunRequest(node=self.node, run_id=run)).run)
        request = GetFabRequest(node=self.node, hash_str=about.fab_hash, run_id=run)
        bundle = fab_from_proto(self.client.GetFab(request).fab).content
        return experiment_of(bundle, about.fab_hash, about.override_config)

    def envelope(self, run: int, tree: ObjectTree) -> bytes:
        """The envelope that a message carries."""
        pull = make_pull_object_fn_protobuf(self.client.PullObject, self.node, run)
        confirm = make_confirm_message_received_fn_protobuf(self.client.ConfirmMessageReceived, self.node, run)
        return from_record(pull_and_inflate_object_from_tree(tree, pull, confirm, return_type=Message).content)

    def send(self, run: int, reply: Message, seconds: float) -> None:
        """Send the answer to a message."""
        reply.metadata.__dict__["_message_id"] = reply.object_id
        with no_object_id_recompute():
            objects, about = get_all_nested_objects(reply), remove_content_from_message(reply)
            request = PushMessagesRequest(
                node=self.node,
                messages_list=[message_to_proto(about)],
                message_object_trees=[get_object_tree(reply)],
                clientapp_runtime_list=[seconds],
            )
            taken = self.client.PushMessages(request)
            push = make_push_object_fn_protobuf(self.client.PushObject, self.node, run, taken.session_id)
            push_objects(objects, push, object_ids_to_push=set(taken.objects_to_push))


def _obstacle(error: Exception | None) -> str:
    """Why a request did not succeed yet."""
    if isinstance(error, httpx.HTTPStatusError):
        if error.response.status_code == NOT_ACTIVATED:
            return "does not take this site: key.pub is not registered there, or it was connected a minute ago"
        return f"answers {error.response.status_code}, so the SuperLink behind it is away"
    return f"cannot be reached ({error})"


class Retries(RetryInvoker):
    """Tries a request again while the server cannot be reached, and says so. Anything else is final."""

    def __init__(self, server: str, say: Say) -> None:
        super().__init__(
            lambda: exponential(max_delay=LONGEST_PAUSE),
            (httpx.TransportError, httpx.HTTPStatusError),
            max_tries=None,
            max_time=None,
            on_backoff=lambda state: say(f"{server} {_obstacle(state.exception)}: trying again"),
            should_giveup=self.is_final,
        )
        self.server = server

    @staticmethod
    def is_final(error: Exception) -> bool:
        """Whether trying again cannot help: a wrong certificate, or an answer that is a refusal."""
        if isinstance(error, httpx.HTTPStatusError):
            return error.response.status_code not in (NOT_ACTIVATED, 429, 502, 503, 504)
        return "certificate" in str(error).lower()

    def invoke(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `target`; what is final becomes an error that says what to do."""
        try:
            return super().invoke(target, *args, **kwargs)
        except httpx.HTTPStatusError as error:
            status, answer = error.response.status_code, error.response.text[:200]
            if status == 403:
                raise RunEnded("the run has ended", 1) from None
            if status == 401:
                raise FedsieveError(
                    f"{self.server} does not know this site's key: its operator registers key.pub", 1
                ) from None
            raise FedsieveError(f"{self.server} answered {status}: {answer}", 1) from None
        except httpx.TransportError as error:
            raise FedsieveError(
                f"{self.server}: {error}. Its certificate must be signed by this site's ca.crt, and name this address",
                1,
            ) from None


@contextmanager
def connected(folder: Path, settings: SiteSettings, say: Say) -> Iterator[Link]:
    """A connection under this site's key, kept alive by heartbeats."""
    key, server, link = read_site_key(folder / "key"), settings.server, None
    retries = Retries(server, say)
    with FleetClient.from_server_address(
        server,
        False,
        str(folder / "ca.crt"),
        [RuntimeVersionHttpInterceptor("fedsieve node"), NodeAuthHttpInterceptor(key, key.public_key())],
        retry_invoker=retries,
    ) as client:
        public, over = public_key_to_bytes(key.public_key()), threading.Event()
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        try:
            link = Link(client, client.ActivateNode(request).node_id)
            threading.Thread(target=_beat, args=(link, over, say), daemon=True).start()
            say(f"connected to {server} as node {link.node.node_id}")
            yield link
        finally:
            over.set()
            retries.max_tries = 1
            if link is not None:
                with suppress(FedsieveError):
                    client.DeactivateNode(DeactivateNodeRequest(node_id=link.node.node_id))


def _beat(link: Link, over: threading.Event, say: Say) -> None:
    """Tell the server every few seconds that the site is there."""
    request = SendNodeHeartbeatRequest(node=link.node, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
    while not over.wait(HEARTBEAT_DEFAULT_INTERVAL / 3):
        try:
            known = link.client.SendNodeHeartbeat(request).success
        except FedsieveError:
            known = False
        if not known and not over.is_set():
            say("the server does not know this site any more")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # a service manager starts it again


class SiteProcess:
    """What answers the messages of one site."""

    def __init__(self, folder: Path, link: Link, say: Say) -> None:
        self.folder, self.link, self.say = folder, link, say
        self.settings = read_site(folder)
        self.accepted = Accepted(folder, self.settings.policy)
        self.experiment = lru_cache(maxsize=16)(link.experiment)  # of the newest runs

    def next(self) -> bool:
        """Answer the next message, if there is one."""
        if (received := self.link.receive()) is None:
            return False
        (message, tree), began = received, time.monotonic()
        run = message.metadata.run_id
        try:
            reply = self._reply(message, run, tree)
            seconds = time.monotonic() - began
            self.link.send(run, reply, seconds)
            self.say(f"run {run}: answered in {seconds:.1f} s")
        except RunEnded:
            self.say(f"run {run} has ended")
        return True

    def _reply(self, message: Message, run: int, tree: ObjectTree) -> Message:
        """An answer, or an error whose reason tells the server no more than a word."""
        try:
            digest = self.accepted.check(self.experiment(run))
            envelope = self.link.envelope(run, tree)
            return Message(to_record(self._answer(envelope, digest, message.metadata.ttl)), reply_to=message)
        except Refused as refusal:
            self.say(f"run {run} is {refusal}")
            return Message(Error(REFUSED, refusal.code), reply_to=message)
        except RunEnded:
            raise
        except Exception as error:  # whatever a hostile message causes: the site goes on
            self.say(f"run {run}: a message could not be answered: {type(error).__name__}: {error}")
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the site cannot answer"), reply_to=message)

    def _answer(self, envelope: bytes, digest: str, seconds: float) -> bytes:
        own = self.settings.model_dump(include={"client", "data", "weights", "device"}, exclude_none=True)
        own.setdefault("device", "auto")  # never the server's choice
        place = own | {"folder": str((self.folder / "files").absolute()), "accepted": digest}
        question, _ = unwrap(envelope)
        answer = answer_warm(envelope, place, seconds, self.settings.idle)
        self.accepted.spend(digest, str(question.get("ask")), len(answer))
        return answer


def run_site(folder: Path, say: Say) -> NoReturn:
    """Answer the server's messages until the process is told to end."""
    settings = read_site(folder)

    def stop(number: int, _: Any) -> None:
        raise Stopped("the site has left", number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with connected(folder, settings, say) as link:
        site = SiteProcess(folder, link, say)
        while True:
            if not site.next():
                time.sleep(POLL)
