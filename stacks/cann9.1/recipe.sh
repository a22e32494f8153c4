# shellcheck shell=bash disable=SC2034 # internal/recipe.sh reads them
# Sourced by internal/recipe.sh: what the recipes say otherwise to verl 0.9.1 than to verl 0.7.1.

# Keys that verl 0.9.1 lacks, because it always does so: it loads the weights (but see megatron_training.py), offloads gradients
# with the parameters, has no other workers, and normalizes the loss over the whole mini-batch.
GONE='actor_rollout_ref.*.load_weight|actor_rollout_ref.*.megatron.grad_offload|trainer.use_legacy_worker_impl'
GONE+='|actor_rollout_ref.actor.whole_batch_loss'
# MindSpeed's name for what num_layers_in_first_pipeline_stage and _last_ say to megatron-core, stops with core 0.16.
OVERRIDE=actor_rollout_ref.actor.megatron.override_transformer_config
GONE+="|+$OVERRIDE.pipeline_num_transformer_layers"

# verl keeps this dictionary for others.
CUSTOM=+actor_rollout_ref.rollout.custom
MANAGER=ascend_rl.glue.cann9_1.rollout_manager.RolloutManager

# verl 0.9.1 loads Hugging Face weights through mbridge.
MISSING="actor_rollout_ref.actor.megatron.use_mbridge=False"

# FSDP otherwise computes in bfloat16, whatever fsdp_config.dtype says; SMOKE_DTYPE=float32 needs it too.
FSDP_FLOAT32="+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"

# translate ARGUMENTS...: into the array kept.
translate() {
    local argument name
    kept=()
    for argument in "$@"; do
        name="${argument%%=*}"
        # shellcheck disable=SC2053 # patterns
        if [[ "$argument" == @($MISSING)* ]]; then
            log "STACK=$STACK does without $argument"
        elif [[ "$name" == actor_rollout_ref.rollout.@(data_rebalance|use_tqdm|rollout_rebalance.*) ]]; then
            kept+=("$CUSTOM.${argument#actor_rollout_ref.rollout.}")
        elif [[ "$name" == actor_rollout_ref.actor.compute_old_log_prob ]]; then
            kept+=("$CUSTOM.${argument#actor_rollout_ref.actor.}")
        elif [[ "$argument" == *.speculative_config.method=sam ]]; then  # vLLM's door for drafters of others
            kept+=("$name=custom_class" "${name%method}model=ascend_rl.glue.cann9_1.sam.SamDrafter")
        elif [[ "$name" != @($GONE) ]]; then
            kept+=("$argument")
        fi
    done
}

# stack: change ARGS and OVERRIDES; called before keys that are given twice are settled.
stack() {
    if [ "$(setting actor_rollout_ref.actor.load_weight)" = False ]; then
        ARGS+=(+actor_rollout_ref.{actor,ref}.megatron.override_mcore_model_config.load_weight=False)
    fi
    if [ "$(setting "$OVERRIDE.moe_zero_memory")" = level1 ] && ! switched USE_ALLTOALL_OVERLAP; then
        recompute_layers # instead
        MISSING+="|+$OVERRIDE.moe_alltoall_overlap_comm|+$OVERRIDE.moe_zero_memory"
    fi
    translate "${ARGS[@]}"
    ARGS=("${kept[@]}" "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=$MANAGER")
    translate "${OVERRIDES[@]}"
    OVERRIDES=("${kept[@]}")
    ARGS+=(transfer_queue.backend.SimpleStorage.num_data_storage_units=1)
    if [ -t 2 ] || [ "${ASCEND_RL_TERMINAL:-0}" = 1 ]; then ARGS=("$CUSTOM.use_tqdm=True" "${ARGS[@]}"); fi
    # vllm-ascend 0.23 reads no variable for it, and prefetches attention's weights too.
    if [ "${VLLM_ASCEND_ENABLE_PREFETCH_MLP:-0}" = 1 ]; then
        ARGS+=(+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.weight_prefetch_config.enabled=True)
    fi
    if [ "$(setting actor_rollout_ref.actor.strategy)" = fsdp ]; then
        ARGS+=(actor_rollout_ref.actor.strategy=fsdp2)
        if [ "$(setting actor_rollout_ref.actor.fsdp_config.dtype)" = float32 ]; then ARGS+=("$FSDP_FLOAT32"); fi
        if [ "$(setting trainer.device)" = cpu ]; then
            # On CPUs torch updates one parameter at a time, and DTensor plans each of those operations again.
            ARGS+=(+actor_rollout_ref.actor.optim.override_optimizer_config.fused=True)
        fi
    elif [ "$(setting actor_rollout_ref.actor.strategy)" = megatron ]; then
        # MindSpeed r0.16 fuses SwiGLU where Megatron does, and reads use_fused_swiglu in the alltoall overlap alone.
        if [ "$(setting "$OVERRIDE.use_fused_swiglu")" = True ]; then ARGS+=("+$OVERRIDE.bias_activation_fusion=True"); fi
        # What verl says to Megatron anyway; MindSpeed looks for it here.
        if [ "$(setting "$OVERRIDE.swap_optimizer")" = True ]; then ARGS+=("+$OVERRIDE.use_distributed_optimizer=True"); fi
        # Megatron-Bridge, the default, wants transformers < 5.
        ARGS+=(actor_rollout_ref.actor.megatron.vanilla_mbridge=True)
    fi
}
