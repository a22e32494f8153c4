"""MoE layers of vllm-ascend 0.23.0: in chunks (chunked_moe), and with experts that move (EPLB)."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import torch

from ascend_rl.experts.chunked_moe import in_chunks
from ascend_rl.experts.eplb_load import real_rows, rows_by_slot
from ascend_rl.experts.eplb_policy import VllmAscendPolicy, failure, own_plan, plan_of_all
from ascend_rl.experts.support_eplb import OURS, CurrentExperts, in_slots
from ascend_rl.glue.cann9_1.hooks import Hooks, first, then

hooks = Hooks()
BY_STEP = 3  # vllm-ascend's policy that wants the loads of each step: those are counted as they are received


@hooks.after("vllm_ascend.ops.fused_moe.fused_moe")
def compute_in_chunks(module: ModuleType) -> None:
    """VLLM_FUSED_MOE_CHUNK_SIZE. Routes (ROUTER_REPLAY=R3) are recorded for all chunks at once."""
    method, capturer = module.AscendUnquantizedFusedMoEMethod, "_ascend_routed_experts_capturer"
    apply_to_all = method.apply

    def apply(self, **arguments):
        layer, routes = arguments["layer"], []
        whole = functools.partial(apply_to_all, self)
        chunked = in_chunks(whole, module._EXTRA_CTX, layer.multistream_overlap_gate)
        recorder = getattr(layer, capturer, None)
        if chunked is whole or recorder is None:
            return chunked(**arguments)
        setattr(layer, capturer, SimpleNamespace(capture=lambda layer_id, topk_ids: routes.append(topk_ids)))
        try:
            return chunked(**arguments)
        finally:
            setattr(layer, capturer, recorder)
            recorder.capture(layer_id=layer.layer_id, topk_ids=torch.cat(routes)[: len(arguments["x"])])

    method.apply = apply


@hooks.after("vllm_ascend.ascend_config")
def accept_our_policy(module: ModuleType) -> None:
    """eplb_policy_type=4."""
    validate = module.EplbConfig._validate_config

    def _validate_config(self) -> None:
        policy = self.config["eplb_policy_type"]
        if policy != OURS:
            return validate(self)
        self.config["eplb_policy_type"] = 0
        validate(self)
        self.config["eplb_policy_type"] = policy

    module.EplbConfig._validate_config = _validate_config


@hooks.after("vllm_ascend.eplb.core.policy.policy_factory")
def know_our_policy(module: ModuleType) -> None:
    generate = module.PolicyFactory.generate_policy

    def generate_policy(policy_type: int):
        return VllmAscendPolicy(None) if policy_type == OURS else generate(policy_type)

    module.PolicyFactory.generate_policy = staticmethod(generate_policy)


@hooks.after("vllm_ascend.eplb.core.eplb_worker")
def send_failures(module: ModuleType) -> None:
    """A planner that fails ends its process, and every rank waits for its plan forever."""
    update = module.EplbWorker.do_update

    def do_update(self):
        try:
            return update(self)
        except Exception:
            return failure()

    module.EplbWorker.do_update = do_update


@hooks.after("vllm_ascend.eplb.eplb_updator")
def outlive_failures(module: ModuleType) -> None:
    """If the planner of any rank has failed, all keep their experts; loads are of all slots, see below."""
    updator = module.EplbUpdator
    before, end, gather = updator.forward_before, updator.forward_end, updator.compute_and_set_moe_load

    def forward_before(self) -> None:
        if self.update_info_all is None:
            return
        if self.get_update_info_flag():
            self.update_info_all = own_plan(self.eplb_process.block_update_q, self.process)
        else:
            before(self)

    def forward_end(self, *args) -> None:
        if self.get_update_info_flag():
            self.update_info_all = plan_of_all(
                self.update_info_all, self.device, self.comm_group.device_group
            )
            self.cur_iterations += self.update_info_all is None  # past it
        if self.update_info_all is not None:
            end(self, *args)

    def compute_and_set_moe_load(self) -> torch.Tensor:
        load = gather(self)
        if not self.multi_stage:
            load = load.sum(1).unflatten(1, (load.shape[1], -1))
            self.shared_dict["moe_load"] = load
        return load

    updator.forward_before, updator.forward_end = forward_before, forward_end
    updator.compute_and_set_moe_load = compute_and_set_moe_load


@hooks.after("vllm_ascend.eplb.adaptor.vllm_adaptor")
def follow_moved_experts(module: ModuleType) -> None:
    """A weight sync replaces the parameters, and puts experts where the layer's map says."""

    def find_each_time(self) -> None:
        if self.model.quant_config is None:
            self.expert_param_per_layer = CurrentExperts(self.model)

    def tell_the_layer(self, layer_id, updated_expert_map) -> None:
        self.moe_layers[layer_id]._expert_map.copy_(updated_expert_map)

    then(module.VllmEplbAdaptor, "init_expert_param_per_layer", find_each_time)
    then(module.VllmEplbAdaptor, "do_update_expert_map", tell_the_layer)


@hooks.after("vllm_ascend.ops.fused_moe.token_dispatcher")
def mask_by_slot(module: ModuleType) -> None:
    """Where all ranks have all tokens, they are chosen by the map of experts, though they are slots."""
    dispatcher = module.TokenDispatcherWithAllGather
    dispatch = dispatcher.token_dispatch

    def token_dispatch(self, token_dispatch_input):
        given = token_dispatch_input.routing
        if given.log2phy is not None and given.expert_map is not None:
            slots = torch.arange(self.num_experts, device=token_dispatch_input.topk_ids.device)
            own = in_slots(slots, self.ep_rank, self.num_experts_local, given.global_redundant_expert_num)
            routing = replace(given, expert_map=own.int() - 1)
            token_dispatch_input = replace(token_dispatch_input, routing=routing)
        return dispatch(self, token_dispatch_input)

    dispatcher.token_dispatch = token_dispatch


@hooks.after("vllm_ascend.worker.model_runner_v1")
def know_real_tokens(module: ModuleType) -> None:
    """Which rows of a step are tokens: none of a dummy batch. Graphs read the mask, so it is one tensor."""
    from vllm.forward_context import get_forward_context
    from vllm_ascend.ascend_forward_context import get_mc2_mask

    runner = module.NPUModelRunner
    dummy_run = runner._dummy_run

    def _dummy_run(self, *args, **kwargs):
        self.dummy = True
        try:
            return dummy_run(self, *args, **kwargs)
        finally:
            self.dummy = False

    def mark(self, *args, **kwargs) -> None:
        if self.dynamic_eplb and self.policy_type != BY_STEP:
            context = get_forward_context()
            if not hasattr(self, "real_tokens"):
                self.real_tokens = torch.zeros_like(get_mc2_mask())
            context.real_tokens = self.real_tokens[: len(context.mc2_mask)]
            context.real_tokens.copy_(context.mc2_mask)
            if self.dummy:
                context.real_tokens.zero_()

    runner._dummy_run, runner.dummy = _dummy_run, False
    first(runner, "_model_forward", mark)


@hooks.after("vllm_ascend.ops.fused_moe.moe_comm_method")
def count_real_tokens(module: ModuleType) -> None:
    """By slot of all ranks before they are sent, in place of the rows that this rank's experts receive."""
    from vllm.forward_context import get_forward_context

    def prepare(self, *args, **kwargs):
        output = prepare_all(self, *args, **kwargs)
        real = getattr(get_forward_context(), "real_tokens", None)
        if real is not None:
            shape = output.padded_hidden_states_shape
            split = None if shape is None else {"padded_hidden_states_shape": shape}
            context = SimpleNamespace(mc2_mask=real, sp_enabled=module._EXTRA_CTX.flash_comm_v1_enabled)
            self.real = real_rows(self.moe_config, context, output.router_logits, None, split)
        return output

    def counting(fused_experts):
        def call(self, fused_experts_input):
            result, given = fused_experts(self, fused_experts_input), fused_experts_input
            if given.dynamic_eplb and hasattr(get_forward_context(), "real_tokens"):
                slots = given.routing.log2phy[given.topk_ids]
                here = self.real[: len(slots)]  # and the next chunk has the next ones
                self.real = self.real[len(slots) :]
                here = torch.nn.functional.pad(here, (0, len(slots) - len(here)))
                result.expert_tokens = rows_by_slot(slots, here, self.moe_config.num_experts)
                result.group_list_type = 1
            return result

        return call

    method, fused = module.MoECommMethod, module.FusedMC2CommImpl
    prepare_all, method.prepare = method.prepare, prepare
    method.fused_experts, fused.fused_experts = counting(method.fused_experts), counting(fused.fused_experts)


@hooks.after("vllm_ascend.ops.fused_moe.fused_moe")
def count_all_slots(module: ModuleType) -> None:
    def count_all(self, *args, **kwargs) -> None:
        if self.dynamic_eplb and not self.multi_stage:
            self.moe_load = self.moe_load.new_zeros(self.global_num_experts)

    then(module.AscendFusedMoE, "__init__", count_all)
