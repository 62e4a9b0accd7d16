"""The memory of clients from round to round: personal weights, masks, control variates, rounding errors.

It lives in memory until a checkpoint, and then in files versioned by round, so that a run can go back to any checkpoint
that is kept. A checkpoint holds the table of versions; files that no kept checkpoint names are deleted.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedsieve.errors import FedsieveError
from fedsieve.files import read_sealed, write_sealed

MEMORY = 4 * 2**30  # bytes held before they are written early
PENDING = {True: "if taken: ", False: "if refused: "}  # before names of what waits for the server's verdict


class ClientMemory:
    """Named tensors of every client, in `folder`."""

    def __init__(self, folder: Path, versions: Mapping[str, int] | None = None, memory: int = MEMORY) -> None:
        self.folder, self.memory = folder, memory
        self.versions = {int(client): version for client, version in (versions or {}).items()}
        self._fresh: dict[int, dict[str, Tensor]] = {}
        self._bytes = 0
        if missing := [client for client, version in self.versions.items() if not self._file(client, version).exists()]:
            raise self._lost(
                missing[0], f"missing, with those of {len(missing) - 1:,} others" if missing[1:] else "missing"
            )

    def get(self, client: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """A client's whole memory; empty for a client that never took part."""
        if client not in self._fresh:
            if client not in self.versions:
                return {}
            try:
                content = safetensors.torch.load(read_sealed(self._file(client, self.versions[client])))
            except FileNotFoundError:
                raise self._lost(client, "missing") from None
            except (OSError, ValueError, SafetensorError) as error:
                raise self._lost(client, f"damaged ({error})") from None
            return {name: tensor.to(device) for name, tensor in content.items()}
        return {name: tensor.to(device) for name, tensor in self._fresh[client].items()}

    def put(self, client: int, round: int, **tensors: Tensor) -> None:
        """Add to a client's memory, replacing tensors of the same names."""
        merged = self.get(client) | {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        self._hold(client, merged)
        if self._bytes > self.memory:
            self.write(round)

    def drop(self, client: int, names: Iterable[str]) -> None:
        """Delete some tensors of a client's memory."""
        kept = self.get(client)
        for name in names:
            del kept[name]
        self._hold(client, kept)

    def _hold(self, client: int, content: dict[str, Tensor]) -> None:
        """Keep this of a client until the next write, instead of what was kept before."""
        before = self._fresh.get(client, {})
        self._bytes += sum(new.nbytes for new in content.values()) - sum(old.nbytes for old in before.values())
        self._fresh[client] = content

    def propose(self, client: int, round: int, outcomes: Mapping[bool, Mapping[str, Tensor]]) -> None:
        """Note both outcomes of an update: the memory if it is accepted (True), and if it is refused (False)."""
        tensors = {PENDING[taken] + name: value for taken, those in outcomes.items() for name, value in those.items()}
        if tensors:
            self.put(client, round, **tensors)

    def settle(self, client: int, round: int, taken: bool) -> None:
        """Commit the proposal for an accepted update, or for a refused one."""
        proposed = {
            name: tensor for name, tensor in self.get(client).items() if name.startswith(tuple(PENDING.values()))
        }
        if not proposed:
            return
        self.drop(client, proposed)
        prefix = PENDING[taken]
        kept = {name.removeprefix(prefix): value for name, value in proposed.items() if name.startswith(prefix)}
        self.put(client, round, **kept)

    def write(self, round: int) -> dict[str, int]:
        """Bring everything to the disk, and give the table of versions for a checkpoint."""
        for client, tensors in self._fresh.items():
            # Never over a version that a checkpoint may name.
            version = max(round, self.versions.get(client, -1) + 1)
            content = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_sealed(self._file(client, version), safetensors.torch.save(content))
            self.versions[client] = version
        self._fresh.clear()
        self._bytes = 0
        return {str(client): version for client, version in self.versions.items()}

    def prune(self, kept: Iterable[Mapping[str, int]]) -> None:
        """Delete every file that none of the kept checkpoints' tables names."""
        named = {self._file(int(client), version) for table in kept for client, version in table.items()}
        for file in self.folder.glob("*/*.state"):
            if file not in named:
                file.unlink(missing_ok=True)

    def _file(self, client: int, version: int) -> Path:
        return self.folder / str(client) / f"{version:08d}.state"

    def _lost(self, client: int, how: str) -> FedsieveError:
        run = self.folder.parent
        return FedsieveError(
            f"{self._file(client, self.versions[client])}: what client {client} remembers from its rounds (a mask, weights, a "
            f"control variate or rounding errors of its own) is {how}, and the run cannot go on without it as it was. Put the "
            f"file back, or begin anew: `fedsieve run {run / 'config.yaml'} --out DIR`",
            1,
        )
