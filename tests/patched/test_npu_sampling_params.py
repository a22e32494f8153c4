"""Every field of vLLM's SamplingParams, and hostile values, on vllm-ascend's runner in each way it decodes.

A request answers as in plain decoding, or is refused alone; others beside it do not notice.
What an engine raises fails the job, whatever request it was for. Requests reach the engine encoded and
decoded, as they reach an engine in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools

import pytest
from npu_ground import make_llm, save_random_model

from ascend_rl.settings.stack import DEFAULT, NAME

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 3
BESIDE = PROMPT[::-1]
BASE = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
SURE = {"temperature": 1, "top_k": 1}  # a sampled token that is always the likeliest
CUT = 4  # tokens after which a request moves
SAM = {"speculative_config": {"method": "sam", "num_speculative_tokens": 4}}
SIZES = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 5, 8, 10, 20, 40]}
GRAPHS = {"enforce_eager": False, "compilation_config": SIZES}
NOT_AHEAD, AHEAD = {"async_scheduling": False}, {"async_scheduling": True}
MODES = {
    "sam": SAM,
    "graphs": GRAPHS,
    "async": AHEAD,
    "sam in graphs": SAM | GRAPHS,
    "async in graphs": AHEAD | GRAPHS,
    "chunked prefill": {"max_num_batched_tokens": 16},
    "moved": {},
}
INF, NAN = float("inf"), float("nan")
VOCABULARY = 16 if NAME == DEFAULT else 17  # of the tiny tokenizer
UNSERVED = ["logits_processors/0"] if NAME == DEFAULT else ["thinking_token_budget/0"]
NOT_WITH_DRAFTS = set() if NAME == DEFAULT else {"min_p", "logit_bias"}  # says vLLM 0.23, and refuses them


def fields() -> dict[str, list[dict]]:
    """Parameters by the field they try, of the fields that this vLLM has."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    history = [(2, bytes([1, 0, 0, 0, 2, 0, 0, 0, 6, 0, 0, 0]))]
    forms = structures([{"regex": "[0-4]+"}, {"choice": ["12", "345"]}, {"json": {"type": "object"}},
                        {"json_object": True}, {"grammar": 'root ::= "1" | "2"'}, {}])  # fmt: skip
    tries = {
        "n": [{"n": 2} | SURE],
        "presence_penalty": [{"presence_penalty": 1.5}, {"presence_penalty": -2.0}],
        "frequency_penalty": [{"frequency_penalty": 1.5}],
        "repetition_penalty": [{"repetition_penalty": 1.5}, {"repetition_penalty": 0.5}],
        "temperature": [{"temperature": 0.5, "top_k": 1}],
        "top_p": [{"temperature": 1, "top_p": 1e-6}],
        "top_k": [SURE, SURE | {"min_tokens": 5}],
        "min_p": [{"temperature": 1, "min_p": 1.0}],
        "seed": [{"temperature": 1, "seed": seed} for seed in (7, -5, 2**63, -(2**63))],
        "stop": [{"stop": ["67"]}, {"stop": "2"}],
        "stop_token_ids": [{"stop_token_ids": [7]}],
        "ignore_eos": [{"ignore_eos": False}],
        "max_tokens": [{"max_tokens": tokens} for tokens in (1, None, 10**6)],
        "min_tokens": [{"min_tokens": 8, "stop_token_ids": [2, 6, 7]}],
        "logprobs": [{"logprobs": count} for count in (0, 3, -1)],
        "prompt_logprobs": [{"prompt_logprobs": count} for count in (0, 2, -1)],
        "flat_logprobs": [{"flat_logprobs": True, "logprobs": 1, "prompt_logprobs": 1}],
        "detokenize": [{"detokenize": False}],
        "skip_special_tokens": [{"skip_special_tokens": False}],
        "spaces_between_special_tokens": [{"spaces_between_special_tokens": False}],
        "logits_processors": [{"logits_processors": [len]}],
        "include_stop_str_in_output": [{"include_stop_str_in_output": True, "stop": ["67"]}],
        "truncate_prompt_tokens": [{"truncate_prompt_tokens": 5}],
        "output_kind": [{"output_kind": RequestOutputKind.FINAL_ONLY}],
        "output_text_buffer_length": [{"output_text_buffer_length": 5}],
        "_all_stop_token_ids": [{"_all_stop_token_ids": {2, 6}, "min_tokens": 3}],
        "structured_outputs": [{"structured_outputs": form} for form in forms],
        "logit_bias": [{"logit_bias": {5: 50.0, 6: -INF}}],
        "allowed_token_ids": [{"allowed_token_ids": [1, 6, 7]}],
        "extra_args": [{"extra_args": {"another": 1}}, {"extra_args": {"sam_history": history}}],
        "bad_words": [{"bad_words": ["67", "2"]}],
        "_bad_words_token_ids": [{"_bad_words_token_ids": [[6, 7], [2]]}],
        "skip_reading_prefix_cache": [{"skip_reading_prefix_cache": True}],
        "logprob_token_ids": [{"logprob_token_ids": [6, 1]}],
        "skip_clone": [{"skip_clone": True}],
        "_eos_token_id": [{"_eos_token_id": 7, "ignore_eos": False}],
        "routed_experts_prompt_start": [{"routed_experts_prompt_start": 3}],
        "thinking_token_budget": [{"thinking_token_budget": 3}],
        "repetition_detection": [{"repetition_detection": None}],
    }
    return {name: tries[name] for name in tries if name in SamplingParams.__struct_fields__}


def structures(kinds: list[dict]) -> list:
    """Those that vLLM lets a caller make: 0.23 has refused the others already."""
    from vllm.sampling_params import StructuredOutputsParams

    found = []
    for kind in kinds:
        with contextlib.suppress(*([] if NAME == DEFAULT else [ValueError])):
            found.append(StructuredOutputsParams(**kind))
    return found


def refused() -> list[dict]:
    """What no engine can serve."""
    integer = {"type": "integer", "multipleOf": 3}
    kinds = [
        {"grammar": "root ::= ("}, {"grammar": " "}, {"regex": "("}, {"regex": "[]"}, {"json": '{"type": '},
        {"json": {"type": "nonsense"}}, {"choice": []}, {"structural_tag": "{}"}, {"json_object": False},
        {"json": {"type": "object", "properties": {"a": integer}}},
    ]  # fmt: skip
    forms = [*structures(kinds), {"regex": "1"}]
    return [
        {"n": 0}, {"n": 2}, {"presence_penalty": 3.0}, {"presence_penalty": NAN}, {"repetition_penalty": 0.0},
        {"repetition_penalty": NAN}, {"repetition_penalty": INF}, {"temperature": NAN}, {"temperature": INF},
        {"temperature": -1.0}, {"temperature": "1"}, {"temperature": None}, {"top_p": 0.0}, {"top_p": NAN},
        {"top_k": -2}, {"top_k": True, "temperature": 1}, {"min_p": NAN}, {"min_p": 2.0}, {"seed": 2**70},
        {"seed": 1.5}, {"seed": "x"}, {"stop": [""]}, {"stop": [1]}, {"stop": ["1"], "detokenize": False},
        {"stop_token_ids": ["a"]}, {"stop_token_ids": [10**9], "min_tokens": 3}, {"stop_token_ids": [2**70]},
        {"stop_token_ids": [-1], "min_tokens": 3}, {"ignore_eos": "yes"}, {"max_tokens": 0},
        {"max_tokens": 5.5}, {"max_tokens": 2**70}, {"min_tokens": -1}, {"min_tokens": 99},
        {"min_tokens": 1.5}, {"logprobs": 10**6}, {"logprobs": VOCABULARY + 1}, {"logprobs": 1.5},
        {"prompt_logprobs": 10**6}, {"prompt_logprobs": VOCABULARY + 1}, {"prompt_logprobs": -2},
        {"prompt_logprobs": "a"}, {"truncate_prompt_tokens": 0}, {"output_kind": 7}, {"output_kind": None},
        {"_all_stop_token_ids": {999}, "min_tokens": 3}, {"logit_bias": {99: 1.0}}, {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1: NAN}}, {"logit_bias": {1: INF}}, {"logit_bias": {"1": 1.0}},
        {"logit_bias": {1.5: 1.0}}, {"logit_bias": {1: "x"}}, {"allowed_token_ids": []}, {"extra_args": "x"},
        {"allowed_token_ids": [99]}, {"allowed_token_ids": [-1]}, {"allowed_token_ids": ["1"]},
        {"allowed_token_ids": [1.0]}, {"extra_args": {"x": object()}}, {"extra_args": {"sam_history": "x"}},
        {"extra_args": {"sam_history": [(1, b"abc")]}}, {"extra_args": {"sam_history": [(2, bytes(4))]}},
        {"extra_args": {"sam_history": [(0, b"\xff\xff\xff\x7f")]}}, {"bad_words": [""]},
        {"bad_words": [" "]}, {"_bad_words_token_ids": [[999]]}, {"_bad_words_token_ids": [[]]},
        {"logits_processors": [len]}, *({"structured_outputs": form} for form in forms),
    ]  # fmt: skip


def odd(directory: str) -> list[dict]:
    """What can be served, however odd; that of a KV connector is for its engine."""
    kv = [5, {"moved_kv": 3}, {"moved_kv": {"directory": 7, "tokens": 20}}, {"moved_kv": {"tokens": 20}},
          {"moved_kv": {"directory": directory, "tokens": 20}},
          {"moved_kv": {"directory": f"{directory}/taken-nothing", "tokens": 20}},
          {"moved_kv": {"directory": f"{directory}/taken-nothing", "tokens": "x"}},
          {"moved_kv": {"directory": f"{directory}/taken-nothing", "tokens": 10**9}}]  # fmt: skip
    return [
        {"top_k": 10**9}, {"top_k": 2**40}, {"temperature": 1, "top_p": 1e-300},
        {"temperature": 1e308, "top_k": 1}, {"repetition_penalty": 1e-300}, {"bad_words": ["1" * 300]},
        {"bad_words": list("0123456789")}, {"stop": ["zzz"] * 100}, {"logit_bias": {}},
        {"logit_bias": dict.fromkeys(range(16), -INF)}, {"allowed_token_ids": [1, 1]},
        {"allowed_token_ids": [1], "logit_bias": {1: -INF}}, {"stop_token_ids": [10**9]},
        *([{"truncate_prompt_tokens": 10**6}] if NAME == DEFAULT else []), {"output_text_buffer_length": -5},
        *({"structured_outputs": form} for form in structures([{"choice": ["\u00fc"]}, {"regex": ""}])),
        *({"extra_args": {"kv_transfer_params": params}} for params in kv),
        {"extra_args": {"kv_transfer_params": kv[-1]}, "prompt_logprobs": 0},
    ]  # fmt: skip


class Engine:
    """An engine, and what its requests were answered."""

    def __init__(self, path: str, options: dict, depot=None):
        from moving_engines import make_engine

        options = {"max_model_len": 128} | options
        llm = make_engine(path, str(depot.directory), **options) if depot else make_llm(path, **options)
        self.engine, self.depot, self.outputs = llm.llm_engine, depot, {}
        self.names = map("movable/{}/0".format, itertools.count())

    def send(self, prompt: list[int], params: dict) -> str:
        """Send a request; its name.

        Raises:
            ValueError, TypeError: the front end refuses it.
        """
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        name, params = next(self.names), SamplingParams(**BASE | params)
        process, more = self.engine.input_processor.process_inputs, {}
        if "supported_tasks" in inspect.signature(process).parameters:
            more = {"supported_tasks": self.engine.get_supported_tasks()}
        request = process(name, {"prompt_token_ids": prompt}, params, **more)
        try:
            request = MsgpackDecoder(EngineCoreRequest).decode(MsgpackEncoder().encode(request))
            self.engine.add_request(name, request, request.sampling_params)
        except Exception as error:
            raise AssertionError(f"the engine cannot take {params}") from error
        return name

    def step(self) -> None:
        self.outputs |= {output.request_id: output for output in self.engine.step()}

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def move(self, prompt: list[int], params: dict) -> dict:
        """The answer to a request that moves, with its KV, after CUT tokens: from here to here."""
        from ascend_rl.rollout.request_mover import remaining

        name = self.send(prompt, params)
        while self.engine.has_unfinished_requests() and len(self.tokens(name)) < CUT:
            self.step()
        if self.outputs[name].finished:
            return self.answer(name)
        self.depot.expect(name, None)
        self.engine.abort_request([name])
        self.step()
        saved = asyncio.run(self.depot.saved(name, 5))
        taken, done = asyncio.run(self.depot.take(saved, None)), self.tokens(name)
        left = remaining(BASE | {"max_tokens": 12} | params, len(done))
        left["extra_args"] = (left.get("extra_args") or {}) | {"kv_transfer_params": taken}
        later = self.send(prompt + done, left)
        self.finish()
        assert self.outputs[later].num_cached_tokens == len(prompt + done) - 1
        first, last = self.answer(name), self.answer(later)
        whole = {key: [first[key][0] + last[key][0]] for key in ("tokens", "log_probs")}
        return last | whole | {"text": None}

    def tokens(self, name: str) -> list[int]:
        return list(self.outputs[name].outputs[0].token_ids) if name in self.outputs else []

    def answer(self, name: str) -> dict:
        output = self.outputs[name]
        return {
            "tokens": [list(one.token_ids) for one in output.outputs],
            "ends": [(one.finish_reason, one.stop_reason) for one in output.outputs],
            "text": [one.text for one in output.outputs],
            "log_probs": [values(one.logprobs) for one in output.outputs],
            "prompt_log_probs": values(output.prompt_logprobs),
        }


def values(log_probs) -> list[list]:
    """By position [token, log-prob] of each token that is given."""
    found = [sorted((entry or {}).items()) for entry in log_probs or ()]
    return [[[token, one.logprob] for token, one in entry] for entry in found]


def serve(path: str, directory: str, options: dict, moving: bool) -> dict:
    """A job: answers by field, what was refused of what cannot be served, and whether all else was served."""
    from ascend_rl.rollout.moved_kv import Depot
    from ascend_rl.rollout.request_mover import can_move

    depot = Depot(directory, "here", {}, 1) if moving else None
    engine = Engine(path, options, depot)
    found = {"fields": {}, "refused": {}, "beside": []}
    names, beside = {}, []
    for field, tries in fields().items():
        for number, params in enumerate(tries):
            name = f"{field}/{number}"
            movable = moving and "max_tokens" not in params and can_move(params)
            beside.append(engine.send(BESIDE, {}))
            try:
                if movable:
                    found["fields"][name] = engine.move(PROMPT, params)
                else:
                    names[name] = engine.send(PROMPT, params)
            except (ValueError, TypeError) as error:
                found["fields"][name] = {"refused": str(error)}
    prompts = [[], [VOCABULARY], [-1], [1.5], ["1"], [None], [1] * 129]
    for prompt, params in [(PROMPT, params) for params in refused()] + [(prompt, {}) for prompt in prompts]:
        name = repr(params or prompt[:2])
        try:
            engine.send(prompt, params)
            found["refused"][name] = None
        except (ValueError, TypeError) as error:
            found["refused"][name] = str(error)
    refusing = NOT_WITH_DRAFTS if "speculative_config" in options else set()
    tries = [params for params in odd(str(depot and depot.directory)) if not refusing & params.keys()]
    served = [engine.send(PROMPT, params) for params in tries]
    beside.append(engine.send(BESIDE, {}))
    engine.finish()
    assert all(engine.outputs[name].finished for name in served)
    found["fields"] |= {name: engine.answer(request) for name, request in names.items()}
    found["beside"] = [engine.tokens(name) for name in beside]
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_random_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def plain(npu_ground, model, tmp_path_factory):
    return npu_ground.run(serve, model, str(tmp_path_factory.mktemp("kv")), NOT_AHEAD, False)


def test_every_field_is_tried():
    from vllm import SamplingParams

    assert set(fields()) == set(SamplingParams.__struct_fields__)


def check_refusals(found: dict) -> None:
    assert [params for params, message in found["refused"].items() if not message] == []
    assert [tokens for tokens in found["beside"] if tokens != found["beside"][0]] == []


def test_plain_decoding_serves_or_refuses_each_request_alone(plain):
    check_refusals(plain)
    unserved = [name for name, answer in plain["fields"].items() if "refused" in answer]
    assert unserved == UNSERVED


@pytest.mark.parametrize("mode", MODES)
def test_answers_are_those_of_plain_decoding(npu_ground, model, plain, tmp_path, mode):
    """But for a seed: drafts take random numbers of their own, and a move makes another of it."""
    found = npu_ground.run(serve, model, str(tmp_path), MODES[mode], mode == "moved")
    check_refusals(found)
    assert found["beside"][0] == plain["beside"][0]
    for name, answer in found["fields"].items():
        expected = plain["fields"][name]
        if name.startswith("seed") and ("sam" in mode or mode == "moved"):
            continue
        if name.partition("/")[0] in NOT_WITH_DRAFTS and "sam" in mode:
            assert "refused" in answer, name
            continue
        if name.startswith("logprob_token_ids") and "sam" in mode:  # vLLM 0.23 leaves them out beside drafts
            continue
        if answer.get("text", 0) is None:
            expected = expected | {"text": None}  # that of a move is in two parts
        assert exact(answer) == exact(expected), name
        assert list(numbers(answer)) == pytest.approx(list(numbers(expected)), abs=1e-4), name


def exact(answer: dict) -> dict:
    return {key: value for key, value in answer.items() if not key.endswith("log_probs")}


def numbers(value):
    """All log-probs of an answer, with their tokens."""
    if isinstance(value, dict):
        value = [value[key] for key in value if key.endswith("log_probs")]
    if isinstance(value, list):
        for one in value:
            yield from numbers(one)
    else:
        yield value
