# shellcheck shell=bash disable=SC2034 # internal/recipe.sh reads them
# Sourced by internal/recipe.sh: what the recipes say otherwise to verl 0.9.1 than to verl 0.7.1.

# Keys that verl 0.9.1 lacks, because it always does so: it loads the weights, offloads gradients with the parameters, has no
# other workers, and normalizes the loss over the whole mini-batch.
GONE='actor_rollout_ref.*.load_weight|actor_rollout_ref.*.megatron.grad_offload|trainer.use_legacy_worker_impl'
GONE+='|actor_rollout_ref.actor.whole_batch_loss'

# FSDP otherwise computes in bfloat16, whatever fsdp_config.dtype says; SMOKE_DTYPE=float32 needs it too.
FSDP_FLOAT32="+actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"

# stack: change ARGS; called before keys that are given twice are settled.
stack() {
    local argument kept=()
    for argument in "${ARGS[@]}"; do
        # shellcheck disable=SC2254 # a pattern
        [[ "${argument%%=*}" == @($GONE) ]] || kept+=("$argument")
    done
    ARGS=("${kept[@]}" transfer_queue.backend.SimpleStorage.num_data_storage_units=1)
    # vllm-ascend 0.23 reads no variable for it, and prefetches attention's weights too.
    if [ "${VLLM_ASCEND_ENABLE_PREFETCH_MLP:-0}" = 1 ]; then
        ARGS+=(+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.weight_prefetch_config.enabled=True)
    fi
    if [ "$(setting actor_rollout_ref.actor.strategy)" = fsdp ]; then
        ARGS+=(actor_rollout_ref.actor.strategy=fsdp2)
        if [ "$(setting actor_rollout_ref.actor.fsdp_config.dtype)" = float32 ]; then ARGS+=("$FSDP_FLOAT32"); fi
    elif [ "$(setting actor_rollout_ref.actor.strategy)" = megatron ]; then
        # Megatron-Bridge, the default, wants transformers < 5.
        ARGS+=(actor_rollout_ref.actor.megatron.vanilla_mbridge=True)
    fi
}
