"""What is wrong in vllm-ascend 0.23.0, right (docs/stacks.md, "What is wrong upstream")."""

from __future__ import annotations

from types import ModuleType

from ascend_rl.glue.cann9_1.hooks import Hooks, first
from ascend_rl.rollout.a2_shared_card import may_fuse
from ascend_rl.rollout.npu_graph import kernel_sizes
from ascend_rl.rollout.npu_options import expansion_mode
from ascend_rl.speculation.rejection_sampler import expand
from ascend_rl.weights.sleep_level_2 import unregistered

hooks = Hooks()


@hooks.after("vllm_ascend.sample.sampler")
def draw_after_the_division(module: ModuleType) -> None:
    """Random numbers are free memory once the host returns: draw the next ones behind their use."""
    original = module.random_sample

    def random_sample(probs, generators):
        tokens = original(probs, generators)
        module.global_stream().wait_stream(module.torch.npu.current_stream())
        return tokens

    module.random_sample = random_sample


@hooks.after("vllm_ascend.sample.rejection_sampler")
def expand_rows_without_triton(module: ModuleType) -> None:
    """Drafts have a row for each token: fallbacks take penalties by request, and 0 x inf for other rows."""
    if not module.HAS_TRITON:
        module.AscendRejectionSampler.apply_penalties = staticmethod(module.RejectionSampler.apply_penalties)
        module.expand_batch_to_tokens = expand


@hooks.after("vllm_ascend.worker.worker")
def keep_what_level_2_takes(module: ModuleType) -> None:
    """Sleep level 2 discards what is made while a model is loaded: expert maps and ids, rotary tables."""
    worker = module.NPUWorker
    load, sleep, wake_up = worker.load_model, worker.sleep, worker.wake_up

    def load_model(self) -> None:
        load(self)
        if self.vllm_config.model_config.enable_sleep_mode:
            allocator = module.CaMemAllocator.get_instance()
            self.unregistered = unregistered(self.model_runner.model, allocator)

    def save_and_sleep(self, level: int = 1) -> None:
        if level == 2:
            self.unregistered.save()
        sleep(self, level)

    def wake_up_and_restore(self, tags: list[str] | None = None) -> None:
        wake_up(self, tags)
        self.unregistered.restore(tags)

    worker.load_model, worker.sleep, worker.wake_up = load_model, save_and_sleep, wake_up_and_restore


@hooks.after("vllm_ascend.utils")
def set_expansion_modes(module: ModuleType) -> None:
    """additional_config.hccl_op_expansion_mode: the mode of each communication domain."""
    options = module.get_hccl_config_for_pg_options

    def get_hccl_config_for_pg_options(group_name: str) -> dict | None:
        from vllm.config import get_current_vllm_config

        modes = get_current_vllm_config().additional_config.get("hccl_op_expansion_mode")
        return expansion_mode(options(group_name), group_name, modes)

    module.get_hccl_config_for_pg_options = get_hccl_config_for_pg_options


@hooks.after("vllm_ascend.compilation.compiler_interface")
def compile_for_all_graphs(module: ModuleType) -> None:
    """Static kernels are for the sizes before vLLM rounds them up for drafts, and for steps with drafts."""
    module._compute_decode_cudagraph_batch_sizes = kernel_sizes


@hooks.after("vllm_ascend.ascend_forward_context")
def exchange_apart_on_a_shared_a2(module: ModuleType) -> None:
    """Fused collectives of an Atlas A2 do not support a trainer's process beside the engine's."""
    select = module._select_a2_moe_comm_method

    def _select_a2_moe_comm_method(num_tokens, vllm_config, *args):
        sleeps = vllm_config.model_config.enable_sleep_mode
        if not may_fuse("A2", sleeps):
            return module.MoECommType.ALLGATHER
        return select(num_tokens, vllm_config, *args)

    module._select_a2_moe_comm_method = _select_a2_moe_comm_method


@hooks.after("vllm_ascend.worker.model_runner_v1")
def scatter_apart_on_a_shared_a2(module: ModuleType) -> None:
    """Nor does matmul with reduce-scatter (FlashComm1)."""

    def scatter_apart(self, *args, **kwargs) -> None:
        chip, sleeps = module.get_ascend_device_type().name, self.model_config.enable_sleep_mode
        module.get_forward_context().mmrs_fusion &= may_fuse(chip, sleeps)

    first(module.NPUModelRunner, "_model_forward", scatter_apart)


@hooks.after("vllm_ascend.worker.model_runner_v1")
def compute_own_rows(module: ModuleType) -> None:
    """Beside one rank's prefill no rank has a graph, and the all-to-all takes unequal rows.

    Ranks that would have replayed a graph pad to the rows of that rank all the same.
    """
    runner = module.NPUModelRunner
    synchronize, no_graph = runner._sync_metadata_across_dp, module.CUDAGraphMode.NONE

    def _sync_metadata_across_dp(
        self, num_tokens, is_draft_model=False, cudagraph_mode=no_graph, allow_dp_padding=False
    ):
        pads = module.enable_sp(self.vllm_config) or module.oproj_tp_enable() or module.embedding_tp_enable()
        if is_draft_model or pads or self.dp_size == 1:
            return synchronize(self, num_tokens, is_draft_model, cudagraph_mode, allow_dp_padding)
        most, rows, mode = synchronize(self, num_tokens, False, cudagraph_mode)
        alltoall = module.select_moe_comm_method(most, self.vllm_config) == module.MoECommType.ALLTOALL
        if allow_dp_padding and not (mode == no_graph and alltoall):
            rows = rows.new_full(rows.shape, most)
        return most, rows, mode

    runner._sync_metadata_across_dp = _sync_metadata_across_dp
