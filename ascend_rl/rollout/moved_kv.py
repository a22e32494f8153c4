"""The KV of running requests that move, from one rollout server to another, in files.

The target of a move can recompute a request's KV, which stalls all that step with it, or copy it from the
source. A move with KV is a directory. The source's front end makes it before it aborts the request; each
worker of the source writes its part into it at the start of the engine's next step, before a freed block can
have a new owner. The target's front end takes it over by renaming it, checks it and names it to its engine;
the workers copy it into the request's blocks in the step that admits it. Only the newest token is computed.

- A target loads only whole, undamaged files of the same model, weights, block size and parallelism. What is
  missing, damaged, different or late is recomputed, as is a request that moves on before it was admitted.
  No file that cannot be read ends an engine: the workers name its blocks, and the scheduler starts over.
- A directory belongs to one server at a time and is used once. It is gone when it was used, when its request
  ended, and at the end of the rollout; that of a process that died, when another on its host starts or ends a
  rollout, or after a day.
- A worker writes only what takes no more than half of the free memory.

Cost: two copies of the KV and two passes for its sum, O(bytes); without a move a file operation or two when a
request ends. `MovedKV`, for scheduler and workers, is a vLLM connector without vLLM's base class; `Depot` is
the front ends' side.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the launcher imports this module, by the names of metrics, and needs no torch
    import torch

logger = logging.getLogger(__name__)

CONNECTOR = "ascend_rl.glue.moved_kv_connector.MovedKVConnector"
MEMORY = "/dev/shm"
PREFIX = "ascend-rl-kv-"
ABOUT = "about.json"  # in each directory: which engines can use it
LOCK = "lock"  # in a server's directory
UNUSED_S = 24 * 3600  # after which the directory of a server of another host is taken for that of a dead one
TAKEN = "taken-"  # begins the names of directories that a target has taken
ENDED = ".ended"  # a file beside the directories: the request ended before KV was asked for
HEADER_BYTES = 512
PIECE_BYTES = 1 << 18  # in a processor's cache
PARAMETER = "moved_kv"  # in a request's kv_transfer_params


def place(request_id: str) -> str:
    """The directory's name for one stay of a request.

    >>> place("movable/ab12/0")
    'movable-ab12-0'
    """
    return request_id.replace("/", "-")


# Files: a header, then the blocks of each part of the cache (keys or values of one layer), one after another.


def block_views(kv_caches: Mapping[str, Any], blocks: int | None) -> list[torch.Tensor]:
    """The parts of a worker's KV cache as views [blocks, ...].

    Args:
        kv_caches: by layer a tuple of tensors [blocks, ...], or one tensor with ``blocks`` in any dimension.
    """
    views = {}
    for cache in kv_caches.values():
        for part in cache if isinstance(cache, list | tuple) else [cache]:
            first = 0 if isinstance(cache, list | tuple) else part.shape.index(blocks)
            views.setdefault(part.data_ptr(), part.movedim(first, 0))  # layers can share a cache
    return list(views.values())


def write(path: Path, parts: Sequence[torch.Tensor], blocks: Sequence[int], tokens: int) -> None:
    """Write blocks of a cache; the file appears when it is complete.

    Raises:
        OSError: without room, or if the directory is gone.
    """
    import torch

    data = -(-len(blocks) * sum(_block_bytes(part) for part in parts) // 8) * 8
    room = os.statvfs(path.parent)
    if 2 * (HEADER_BYTES + data) > room.f_bavail * room.f_frsize:
        raise OSError(f"{data} bytes of KV would take more than half of what is free in {path.parent}")
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb+") as file:
        # A full tmpfs kills whoever touches a page that it does not have.
        os.posix_fallocate(file.fileno(), 0, HEADER_BYTES + data)
    words = np.memmap(unfinished, np.uint8, "r+")
    for part, rows in _rows(parts, words[HEADER_BYTES:], len(blocks)):
        rows.copy_(part[torch.tensor(blocks, device=part.device)])
    header = {"tokens": tokens, "blocks": len(blocks), "layout": _layout(parts), "sum": _sum(words)}
    words[:HEADER_BYTES] = np.frombuffer(json.dumps(header).encode().ljust(HEADER_BYTES), np.uint8)
    unfinished.rename(path)


def read(path: Path, parts: Sequence[torch.Tensor], blocks: Sequence[int], skip: int) -> None:
    """Copy a file's blocks from number ``skip`` on into ``blocks`` of a cache.

    Raises:
        ValueError: if the cache has another layout than the source's.
    """
    import torch

    words = np.fromfile(path, np.uint8)  # a page of a mapped file that is gone would end the process
    header = json.loads(words[:HEADER_BYTES].tobytes())
    if header["layout"] != _layout(parts):
        raise ValueError(f"{path} holds KV of another layout than this engine's")
    for part, rows in _rows(parts, words[HEADER_BYTES:], header["blocks"]):
        part[torch.tensor(blocks, device=part.device)] = rows[skip : skip + len(blocks)].to(part.device)


def checked(path: Path) -> dict[str, Any]:
    """The header of a file.

    Raises:
        ValueError: if the file is damaged.
        OSError: if it cannot be read.
    """
    total, size, piece = 0, 0, np.empty(PIECE_BYTES, np.uint8)
    with path.open("rb", buffering=0) as file:
        header = json.loads(file.read(HEADER_BYTES))
        while count := file.readinto(piece):
            total, size = total + int(piece[:count].view(np.uint64).sum()), size + count
    if header["sum"] != total % 2**64 ^ size:
        raise ValueError(f"{path} is damaged")
    return header


def _sum(words: np.ndarray) -> int:
    """A sum of words costs less than a copy, and zeros, a cut or a changed bit change it."""
    data = words[HEADER_BYTES:]
    return int(data.view(np.uint64).sum()) ^ len(data)


def _block_bytes(part: torch.Tensor) -> int:
    return part[0].numel() * part.element_size()


def _layout(parts: Sequence[torch.Tensor]) -> str:
    shapes = [(str(part.dtype), *part.shape[1:]) for part in parts]
    return hashlib.sha256(repr(shapes).encode()).hexdigest()


def _rows(
    parts: Sequence[torch.Tensor], data: np.ndarray, blocks: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each part with its blocks in the file, as a tensor of its type."""
    import torch

    start = 0
    for part in parts:
        end = start + blocks * _block_bytes(part)
        yield part, torch.from_numpy(data[start:end]).view(part.dtype).view(blocks, *part.shape[1:])
        start = end


# In the engine.


@dataclass
class Orders:
    """What the scheduler asks of the workers in one step."""

    saves: list[tuple[str, list[int], int]] = field(default_factory=list)  # directory, blocks, tokens
    loads: list[tuple[str, list[int], int]] = field(default_factory=list)  # directory, blocks, blocks skipped


class MovedKV:
    """A vLLM KV connector; the patch joins it with `KVConnectorBase_V1`, whose attributes it reads."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.directory = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["directory"])
        self.block_size = vllm_config.cache_config.block_size
        self.orders = Orders()
        self.admitted: set[str] = set()  # requests whose KV was loaded or not needed
        self.unloaded: set[int] = set()  # blocks of this step whose KV a worker could not load

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request, num_computed_tokens: int) -> tuple[int, bool]:
        return max(0, self._tokens(request) - num_computed_tokens), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens: int) -> None:
        tokens = self._tokens(request)
        if not tokens:
            return
        self.admitted.add(request.request_id)
        directory, _ = self._given(request)
        if not num_external_tokens:
            return _remove(directory)
        first = (tokens - num_external_tokens) // self.block_size
        needed = blocks.get_block_ids()[0][first : self._blocks(tokens)]
        self.orders.loads.append((directory, needed, first))

    def request_finished(self, request, block_ids: list[int]) -> tuple[bool, None]:
        if self._tokens(request):
            _remove(self._given(request)[0])
        self.admitted.discard(request.request_id)
        directory, tokens = self.directory / place(request.request_id), request.num_computed_tokens
        if directory.is_dir():
            if tokens:
                self.orders.saves.append((str(directory), block_ids[: self._blocks(tokens)], tokens))
            else:
                _remove(directory)
        else:
            with contextlib.suppress(OSError):  # no request has moved from here yet
                directory.with_suffix(ENDED).touch()
        return False, None

    def build_connector_meta(self, scheduler_output) -> Orders:
        orders, self.orders = self.orders, Orders()
        return orders

    def _tokens(self, request) -> int:
        """Tokens whose KV waits to be loaded; the newest is computed, for the next one."""
        given = self._given(request)
        if not given or request.request_id in self.admitted or request.skip_reading_prefix_cache:
            return 0
        return min(given[1], request.num_tokens - 1)

    def _given(self, request) -> tuple[str, int] | None:
        """Directory and tokens of KV that this server's front end took; a caller can name any."""
        params = request.kv_transfer_params
        match params.get(PARAMETER) if isinstance(params, dict) else None:
            case {"directory": str(directory), "tokens": int(tokens)} if tokens > 0:
                path = Path(directory)
                if path.parent == self.directory and path.name.startswith(TAKEN):
                    return directory, tokens
        return None

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    # The workers' side.

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        cache = self._kv_cache_config
        self.parts = block_views(kv_caches, cache.num_blocks if cache else None)
        self.file = f"{self._vllm_config.parallel_config.rank}.kv"

    def start_load_kv(self, forward_context, **_) -> None:
        """Saves come first: a block that is saved may be one that is loaded into."""
        orders = self._get_connector_metadata()
        for directory, blocks, tokens in orders.saves:
            try:
                write(Path(directory, self.file), self.parts, blocks, tokens)
            except Exception as error:
                logger.warning("rollout_rebalance: KV not sent: %s", error)
                _remove(directory)
        for directory, blocks, skip in orders.loads:
            try:
                read(Path(directory, self.file), self.parts, blocks, skip)
            except Exception as error:
                logger.warning("rollout_rebalance: KV in %s recomputed: %s", directory, error)
                self.unloaded.update(blocks)
            _discard(Path(directory), self.file)

    def get_block_ids_with_load_errors(self) -> set[int]:
        unloaded, self.unloaded = self.unloaded, set()
        return unloaded

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer, attn_metadata, **_) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def _remove(directory: str | Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)


def _discard(directory: Path, file: str) -> None:
    """Remove a file, and its directory with the last one."""
    (directory / file).unlink(missing_ok=True)
    if not list(directory.glob("*.kv")):
        _remove(directory)


# In the front ends.


def host() -> str:
    """What the processes that see each other's locks on any file system share, containers included.

    >>> len(host()), host() == host()
    (12, True)
    """
    return hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()[:12]


def _locked(directory: Path) -> int:
    """The lock on a directory: on a file in it, as NFS locks no directory.

    Raises:
        OSError: a process has it, or is just removing the directory, or it is another user's.
    """
    if os.lstat(directory).st_uid != os.geteuid():
        raise PermissionError(f"{directory} belongs to another user")
    lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(directory / LOCK).st_ino != os.fstat(lock).st_ino:
            raise FileNotFoundError(directory)
    except OSError:
        os.close(lock)
        raise
    return lock


class Depot:
    """One server's directory, and what is in it.

    Args:
        base: in which all servers have their directories.
        name: of this server, unique among those alive.
        about: what engines must share to load each other's KV; plain values.
        workers: files that make up one move.
    """

    def __init__(self, base: str | Path, name: str, about: Mapping[str, Any], workers: int):
        self.directory = Path(base, f"{PREFIX}{host()}-{name}")
        self.about, self.workers = dict(about), workers
        self.lock: int | None = None
        self.clear()

    def expect(self, request_id: str, weights: Any) -> None:
        """Have the engine save the KV of a request that is about to be aborted."""
        try:
            self._own()
            directory = self.directory / place(request_id)
            directory.mkdir()
            (directory / ABOUT).write_text(self._about(weights))
        except OSError as error:
            logger.warning("rollout_rebalance: KV not sent: %s", error)

    async def saved(self, request_id: str, seconds: float) -> str | None:
        """The directory with the KV of an aborted request, once it is complete; None if it will not be."""
        directory = self.directory / place(request_id)
        for _ in range(max(1, int(seconds / 0.005))):
            if not directory.is_dir():
                return None
            if directory.with_suffix(ENDED).exists():
                break
            if len(list(directory.glob("*.kv"))) == self.workers:
                return str(directory)
            await asyncio.sleep(0.005)
        _remove(directory)
        return None

    async def take(self, given: str, weights: Any) -> dict[str, Any] | None:
        """Take over what another server, or this one, has saved: the request's ``kv_transfer_params``.

        None if it cannot be used here; the KV is recomputed then.
        """
        directory = self.directory / (TAKEN + Path(given).name)
        try:
            self._own()
            os.rename(given, directory)
            if (directory / ABOUT).read_text() != self._about(weights):
                raise ValueError("it comes from an engine unlike this one, or of other weights")
            files = [directory / f"{rank}.kv" for rank in range(self.workers)]
            headers = await asyncio.to_thread(lambda: [checked(file) for file in files])
            (tokens,) = {header["tokens"] for header in headers}
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("rollout_rebalance: KV in %s recomputed: %s", given, error)
            _remove(directory)
            _remove(given)
            return None
        return {PARAMETER: {"directory": str(directory), "tokens": tokens}}

    def clear(self) -> None:
        """Remove this server's directory and those of servers that died.

        A lock tells of the servers of this host alone: not every file system passes it on to others.
        """
        if self.lock is not None:
            self._drop(self.directory, self.lock)
            self.lock = None
        for directory in self.directory.parent.glob(PREFIX + "*"):
            with contextlib.suppress(OSError):
                here = directory.name.startswith(PREFIX + host())
                if here or time.time() - directory.stat().st_mtime > UNUSED_S:
                    self._drop(directory, _locked(directory))

    def _own(self) -> None:
        """Make the directory and lock it: a lock ends with its process.

        Raises:
            OSError: someone else has it, or is just removing it; there is always replay.
        """
        if self.lock is None:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lock = _locked(self.directory)

    def _drop(self, directory: Path, lock: int) -> None:
        """Remove a directory, under another name: NFS keeps a file as long as it is open."""
        dropped = directory.with_name(f"{PREFIX}{host()}-dropped-{os.getpid()}-{directory.name}")
        with contextlib.suppress(OSError):
            directory.rename(dropped)
        os.close(lock)
        _remove(dropped)

    def _about(self, weights: Any) -> str:
        return json.dumps(self.about | {"weights": weights}, sort_keys=True, default=str)
