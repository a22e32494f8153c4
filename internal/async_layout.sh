# shellcheck shell=bash disable=SC2034 # recipe.sh reads them
# Sourced by recipe.sh. Some nodes train while the others roll out (docs/async.md).

qwen3_32b_fsdp2_async() {
    apart qwen3_32b_fsdp2 4 16
    ARGS+=(
        # Nobody else needs the memory; and verl could not keep old weights apart from offloaded ones.
        actor_rollout_ref.actor.fsdp_config.param_offload=False
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    )
}

qwen3_30b_a3b_async() {
    apart qwen3_30b_a3b 4 8
    ARGS+=(actor_rollout_ref.actor.megatron.param_offload=False)
}

# apart LAYOUT NNODES NPUS_PER_NODE: the layout's training on NNODES - ROLLOUT_NNODES nodes (default: half), and its rollout on
# the others.
apart() {
    local rollout=actor_rollout_ref.rollout v1=trainer.v1 tp
    [ "$STACK" != cann8.5 ] || die "this recipe needs the V1 trainer of verl 0.9.1: set STACK=cann9.1 (docs/async.md)"
    dies "$2" "$3"
    ROLLOUT_NNODES="${ROLLOUT_NNODES:-$((NNODES / 2))}"
    [[ "$ROLLOUT_NNODES" =~ ^[1-9][0-9]*$ ]] && [ "$ROLLOUT_NNODES" -lt "$NNODES" ] ||
        die "ROLLOUT_NNODES=$ROLLOUT_NNODES of NNODES=$NNODES: some have to roll out, and some to train"
    NNODES=$((NNODES - ROLLOUT_NNODES))
    "$1"
    TRAIN_BATCH=$((${PARAMETER_SYNC_STEP:-TRAIN_BATCH / MINI_BATCH} * MINI_BATCH))
    DIES=$((ROLLOUT_NNODES * NPUS_PER_NODE)) tp="$(setting "$rollout.tensor_model_parallel_size")"
    whole "$DIES" "$tp" "the rollout's dies must be a multiple of its TP"
    if [ "$(setting "$rollout.expert_parallel_size")" ]; then experts_everywhere "$tp"; fi
    ARGS+=(
        "$v1".trainer_mode=separate_async
        "$v1".separate_async.parameter_sync_step=$((TRAIN_BATCH / MINI_BATCH))  # updates until the rollout gets weights
        "$v1".separate_async.num_warmup_batches=1               # the rollout is so many batches ahead
        # A response's staleness is at most one less. None is dropped: those would be the longest.
        "$v1".sampler.max_off_policy_threshold=2
        "$v1".sampler.max_off_policy_strategy=wait
        +"$rollout".custom.partial_rollout=True                 # go on with unfinished responses after new weights
        actor_rollout_ref.hybrid_engine=False                   # no rollout on the dies that train
        "$rollout".nnodes="$ROLLOUT_NNODES"
        "$rollout".n_gpus_per_node="$NPUS_PER_NODE"
        "$rollout".checkpoint_engine.backend=nccl               # so verl calls HCCL, too
        "$rollout".free_cache_engine=False                      # nobody else needs the memory
        # What stale responses weigh: the ratio of trainer to rollout, by token.
        algorithm.rollout_correction.rollout_is=token
        algorithm.rollout_correction.rollout_is_threshold=2.0
    )
}
