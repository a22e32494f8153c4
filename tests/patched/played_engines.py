"""verl's rollout server and vLLM's AsyncLLM over engines that are played from recorded messages.

Everything between the engines' sockets and the caller of `generate` is the real code. For test_front_end.py
and bench/bench_front_end.py.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from omegaconf import OmegaConf

from ascend_rl.settings.stack import DEFAULT, NAME

VOCABULARY = 12


class Client:
    """vLLM's client of the engines: hands out their messages, decoded as vLLM decodes them."""

    def __init__(self):
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.serial_utils import MsgpackDecoder

        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.queue: asyncio.Queue = asyncio.Queue()
        self.resources = SimpleNamespace(engine_dead=False)
        self.requests: dict[str, object] = {}
        self.aborted: list[str] = []

    def shutdown(self, timeout=None):
        pass

    async def get_supported_tasks_async(self):
        return ("generate",)

    async def add_request_async(self, request):
        self.requests[request.request_id] = request

    async def abort_requests_async(self, request_ids):
        self.aborted += request_ids

    async def get_output_async(self):
        return self.decoder.decode(await self.queue.get())


def make_async_llm(kind: type, model: Path):
    """An AsyncLLM of this kind whose engines are a `Client`."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.core_client import EngineCoreClient

    given = EngineCoreClient.make_async_mp_client
    EngineCoreClient.make_async_mp_client = staticmethod(lambda *_, **__: Client())
    try:
        args = AsyncEngineArgs(
            model=str(model), enforce_eager=True, max_model_len=256, disable_log_stats=True
        )
        return kind(args.create_engine_config(), object, log_stats=False, log_requests=False)
    finally:
        EngineCoreClient.make_async_mp_client = given


class Server:
    """A vLLMHttpServer over played engines.

    Args:
        plain: ask the engines as verl does, whatever the patch `front_end` asks for.
    """

    def __init__(self, model: Path, engines: int, seats: int, plain: bool = False, **config):
        from ascend_rl.rollout.engine_stats import counting
        from ascend_rl.rollout.rollout_progress import Requests
        from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
        from vllm import envs
        from vllm.utils.gc_utils import freeze_gc_heap
        from vllm.v1.engine.async_llm import AsyncLLM

        self.names = [[f"{engine}-{seat}" for seat in range(seats)] for engine in range(engines)]
        if NAME != DEFAULT:
            from ascend_rl.glue.cann9_1.rollout_server import Server as vLLMHttpServer
        self.server = object.__new__(vLLMHttpServer)
        self.server.config = OmegaConf.create({
            "max_model_len": 256, "response_length": 128, "prompt_length": 64, "use_tqdm": False,
            "enable_rollout_routing_replay": False, **config,
        })  # fmt: skip
        self.server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
        self.server.global_steps, self.server.requests = 0, Requests()
        if NAME == DEFAULT:
            kind = counting(AsyncLLM, quiet=True)
        else:  # what the server's constructor and run_server leave there
            self.server.admitting, self.server._disaggregation_role = set(), None
            self.server.replica_rank = 0
            os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
            envs.disable_envs_cache()  # an engine in this process may have made one
            self.server._submission_paused = self.server._rejecting = False
            own = {"custom": config, "disable_log_stats": True, "full_determinism": False, "mtp": None}
            self.server.config.update(own)
            kind = self.server.counting_llm()
        self.server.engine = make_async_llm(kind, model)
        freeze_gc_heap()  # as vLLM's app does when the server starts; test_engine_stats.py sees it
        self.client = self.server.engine.engine_core
        self.given = {"temperature": 0.9, "top_p": 0.9, "top_k": 50, "logprobs": True}
        if plain:
            from vllm.sampling_params import RequestOutputKind

            self.given |= {
                "detokenize": True, "output_kind": RequestOutputKind.CUMULATIVE, "flat_logprobs": False,
            }  # fmt: skip

    async def start(self, **sampling) -> list[asyncio.Task]:
        """One call of `generate` for each seat; returns when all requests are with the engines."""
        calls = [
            asyncio.create_task(
                self.server.generate([5, 6, 3 + index % 3], dict(self.given | sampling), name)
            )
            for index, name in enumerate(name for names in self.names for name in names)
        ]
        while len(self.client.requests) < len(calls):
            await asyncio.sleep(0.01)
            for call in calls:
                if call.done():
                    call.result()  # raises
        return calls

    def messages(
        self, tokens: int, ends: Sequence[str] = ("length",), log_probs: bool = True
    ) -> list[list[bytes]]:
        """What the engines send: one message an engine and step, a token of each request in it."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
        from vllm.v1.outputs import LogprobsLists
        from vllm.v1.serial_utils import MsgpackEncoder

        encoder, rng, found = MsgpackEncoder(), np.random.default_rng(0), []
        reasons = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
        for step in range(tokens):
            for engine, names in enumerate(self.names):
                ids = rng.integers(3, VOCABULARY, (len(names), 1), dtype=np.int64)
                values = -rng.random((len(names), 1), dtype=np.float32)
                ranks = np.ones(len(names), dtype=np.int64)
                lists = LogprobsLists(ids, values, ranks, None)
                outputs = [
                    EngineCoreOutput(
                        request_id=name,
                        new_token_ids=ids[row].tolist(),
                        new_logprobs=lists.slice_request(row, 1) if log_probs else None,
                        finish_reason=reasons[ends[row % len(ends)]] if step == tokens - 1 else None,
                    )
                    for row, name in enumerate(names)
                ]
                message = EngineCoreOutputs(engine_index=engine, outputs=outputs, timestamp=1.0)
                found.append([bytes(part) for part in encoder.encode(message)])
        return found

    async def play(self, messages: list[list[bytes]]) -> None:
        """A step at a time, as engines in lockstep send them; callers are woken before the next step."""
        for first in range(0, len(messages), len(self.names)):
            for message in messages[first : first + len(self.names)]:
                self.client.queue.put_nowait(message)
            while not self.client.queue.empty():
                await asyncio.sleep(0)
            for _ in range(4):
                await asyncio.sleep(0)
