"""npugraph_ex requests static kernels from torchair if so configured, for the sizes of decode graphs."""

from __future__ import annotations

from ascend_rl.settings.stack import DEFAULT, NAME

ON = {"enable_static_kernel": True}
CASES = [
    # additional_config, method, speculative tokens, graph sizes, max_num_seqs
    (ON, None, 0, [1, 2, 4, 8, 16], 8),
    (ON, "ngram", 3, [1, 2, 3, 6, 9, 13], 8),  # rounded up; 16 would be more than the largest
    (ON, "sam", 3, [1, 2, 6, 9, 13], 8),  # and 1, 2, 6 for steps without drafts
    ({}, "ngram", 3, [8], 8),
]


class Options:
    """As torchair 2.8.0.post2: names it does not have are refused."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __setattr__(self, name, value):
        if name not in self.__dict__:
            raise ValueError(f"no option {name}")
        self.__dict__[name] = value


def torchair_options() -> Options:
    kernel = "_aclnn_static_shape_kernel"
    rest = {f"{kernel}_{name}": None for name in ("build_dir", "sym_value_range", "sym_index")}
    return Options(
        mode="max-autotune",
        debug=Options(run_eagerly=False, aclgraph=Options(disable_reinplace_inplaceable_ops_pass=False)),
        experimental_config=Options(aclgraph=Options(**{kernel: False}, **rest)),
    )


def compile_all(path: str, cases: list) -> list[dict]:
    """What torchair is asked for when vllm-ascend compiles a graph, and the graphs vLLM settles on later."""
    import os
    import sys
    from types import ModuleType

    import torch

    from ascend_rl.rollout.npu_options import later_names
    from vllm.config import CUDAGraphMode
    from vllm.engine.arg_utils import EngineArgs
    from vllm_ascend.compilation.compiler_interface import AscendCompiler

    def backend(compiler_config):
        asked.append(compiler_config)
        return lambda graph, inputs: graph

    if NAME == DEFAULT:
        from ascend_rl.glue.decode_dispatcher import DecodeDispatcher as Dispatcher

        named, sam = dict, {"method": "sam"}
    else:
        from ascend_rl.glue.cann9_1.decode_graphs import Dispatcher

        named, sam = later_names, {"method": "custom_class", "model": "ascend_rl.glue.cann9_1.sam.SamDrafter"}
    asked, answers = [], []
    sys.modules["torchair"] = ModuleType("torchair")
    sys.modules["torchair"].__dict__.update(CompilerConfig=torchair_options, get_npu_backend=backend)
    for additional, method, drafts, sizes, most in cases:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        config = EngineArgs(
            path,
            max_model_len=512,
            max_num_seqs=most,
            speculative_config=(sam if method == "sam" else {"method": method})
            | {"num_speculative_tokens": drafts}
            if method
            else None,
            compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes},
            additional_config=named({"enable_npugraph_ex": True, "refresh": True, **additional}),
        ).create_engine_config()
        config.parallel_config.world_size, config.parallel_config.data_parallel_size_local = 4, 4
        compiler = AscendCompiler()
        compiler.compute_hash(config)  # vLLM calls it before
        compiler.compile(torch.fx.symbolic_trace(torch.nn.Identity()), [torch.ones(2)], {}, None)
        options = asked.pop()
        kernels = options.experimental_config.aclgraph

        # Afterwards, when the runner knows its attention, vLLM settles the sizes of the graphs.
        dispatcher = Dispatcher(config)
        if drafts:
            config.compilation_config.adjust_cudagraph_sizes_for_spec_decode(1 + drafts, 1)
        dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1 + drafts)
        answers.append(
            {
                "static": kernels._aclnn_static_shape_kernel,
                "sizes": kernels._aclnn_static_shape_kernel_sym_value_range,
                "ranks": os.environ.get("LOCAL_WORLD_SIZE"),
                "graphs": sorted({key.num_tokens for key in dispatcher.cudagraph_keys[CUDAGraphMode.FULL]}),
                "rest": [options.mode, options.debug.run_eagerly],
            }
        )
    return answers


def test_kernels_for_the_graphs_that_are_captured(npu_ground, tiny):
    *compiled, off = npu_ground.run(compile_all, str(tiny / "model"), CASES)
    for asked in compiled:
        assert asked["static"] is True
        assert asked["sizes"] == asked["graphs"] != []
        assert asked["ranks"] == "16"  # all ranks of a node: 4 x TP4
    assert off["static"] is False and off["sizes"] is None and off["ranks"] is None
    assert off["rest"] == ["reduce-overhead", True]  # npugraph_ex itself is on
