# shellcheck shell=bash
# Sourced by recipe.sh: the overrides of SMOKE=1, a rehearsal on a tiny model (docs/rehearsal.md).

# split_in_two KEY...: 2 for each of these parallel sizes that the recipe has at 2 or more, else 1; multiplies SMOKE_DIES.
split_in_two() {
    local key value
    for key in "$@"; do
        value="$(setting "$key")"
        if [ "${value:-1}" -gt 1 ]; then value=2; else value=1; fi
        SMOKE_SIZES+=("$key=$value") SMOKE_DIES=$((SMOKE_DIES * value))
    done
}

# smoke: with SMOKE=1, append overrides that replace sizes. All else stays: device npu, graphs, sleep, offload, MindSpeed's
# options, loss, sampling, reward. Parallel sizes above 1 become 2. Call it last. What was replaced is printed at the end of
# the run (python -m ascend_rl.rehearsal).
smoke() {
    switched SMOKE || return 0
    local data="$STACK_DATA/tiny" t=actor_rollout_ref.actor.megatron.override_transformer_config
    local updates=$((TRAIN_BATCH / MINI_BATCH)) argument gen_tp gen_dp=1 stages checkpoint experts strategy
    [ "$(setting trainer.device)" = npu ] || die "SMOKE=1: this recipe already is a small run on CPUs; unset SMOKE"
    experts="$(setting actor_rollout_ref.rollout.expert_parallel_size)"
    strategy="$(setting actor_rollout_ref.actor.strategy)"
    if [ "$experts" ]; then data="$STACK_DATA/tiny_moe"; fi
    # The quickstart's vocabulary is odd with verl 0.9.1: two ranks of Megatron cannot have half each.
    if [ "$strategy" = megatron ] && [ "$STACK" != cann8.5 ]; then data+=_even; fi
    checkpoint="${data}_mcore"
    if switched USE_ALLTOALL_OVERLAP; then checkpoint+=_overlap; fi  # another layout of the experts
    if [ "$(setting actor_rollout_ref.actor.megatron.use_dist_checkpointing)" != True ]; then checkpoint=; fi
    if [ "${DRY_RUN:-0}" != 1 ]; then
        python -m ascend_rl.settings.claim rehearsal "$OUTPUT_DIR" || exit 1
        smoke_data "${experts:+moe}" "$data" "$checkpoint" >&2
    fi

    SMOKE_DIES=1 SMOKE_SIZES=()
    if [ "$strategy" = megatron ]; then
        split_in_two actor_rollout_ref.actor.megatron.{tensor_model,pipeline_model,context}_parallel_size
    else
        split_in_two actor_rollout_ref.actor.ulysses_sequence_parallel_size
    fi
    if [ "$SMOKE_DIES" = 1 ]; then SMOKE_DIES=2; fi
    # The rollout: all dies are one server where experts are spread over it, else they are two.
    gen_tp="$(setting actor_rollout_ref.rollout.tensor_model_parallel_size)"
    if [ "$experts" ]; then
        gen_tp=2 gen_dp=$((SMOKE_DIES / 2))
        stages="$(setting actor_rollout_ref.actor.megatron.pipeline_model_parallel_size)"
        SMOKE_SIZES+=(
            actor_rollout_ref.rollout.expert_parallel_size="$SMOKE_DIES"
            actor_rollout_ref.actor.megatron.expert_model_parallel_size=$((stages > 1 ? SMOKE_DIES / 2 : SMOKE_DIES))
        )
    elif [ "${gen_tp:-1}" -gt 1 ]; then
        gen_tp=$((SMOKE_DIES > 2 ? SMOKE_DIES / 2 : 2))
    fi
    SMOKE_SIZES+=(
        trainer.nnodes=1
        trainer.n_gpus_per_node="$SMOKE_DIES"
        actor_rollout_ref.rollout.tensor_model_parallel_size="${gen_tp:-1}"
        actor_rollout_ref.rollout.data_parallel_size="$gen_dp"
        # The model, the data, lengths, and as many updates per step as the recipe has.
        actor_rollout_ref.model.path="$data/model"
        data.train_files="$data/train.parquet"
        data.val_files="$data/val.parquet"
        data.train_batch_size=$((4 * updates))
        data.max_prompt_length=16
        data.max_response_length=16
        data.dataloader_num_workers=0
        actor_rollout_ref.rollout.n=4
        actor_rollout_ref.actor.ppo_mini_batch_size=4
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128
        actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=128
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=128
        actor_rollout_ref.rollout.max_model_len=64
        actor_rollout_ref.rollout.max_num_seqs=32
        actor_rollout_ref.rollout.max_num_batched_tokens=1024   # FlashComm1 is for more than 1000
        "actor_rollout_ref.rollout.cudagraph_capture_sizes=[4,8,16,32]"
        actor_rollout_ref.rollout.agent.num_workers=1
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
        +actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=64
        reward.num_workers=1
        trainer.total_training_steps="${STEPS:-2}"
        trainer.val_before_train=False
        trainer.test_freq=-1
        trainer.resume_mode=disable
    )
    if [ -n "$(setting actor_rollout_ref.rollout.nnodes)" ]; then # as many dies again for the rollout
        SMOKE_SIZES+=(actor_rollout_ref.rollout.nnodes=1 actor_rollout_ref.rollout.n_gpus_per_node="$SMOKE_DIES")
    fi
    if [ "${SMOKE_DTYPE:-bfloat16}" = float32 ]; then smoke_float32 "$strategy"; fi
    for argument in "${ARGS[@]}"; do
        case "$argument" in
        actor_rollout_ref.actor.megatron.use_dist_checkpointing=True)
            SMOKE_SIZES+=(actor_rollout_ref.actor.megatron.dist_checkpointing_path="$checkpoint") ;;
        actor_rollout_ref.ref.megatron.use_dist_checkpointing=True)
            SMOKE_SIZES+=(actor_rollout_ref.ref.megatron.dist_checkpointing_path="$checkpoint") ;;
        "+$t.context_parallel_size="*) SMOKE_SIZES+=("$t.context_parallel_size=2") ;;
        # Of two stages Megatron takes one number only.
        "+$t.num_layers_in_"*) argument="${argument#+}"; SMOKE_SIZES+=("~${argument%%=*}") ;;
        "+$t.pipeline_num_transformer_layers="*) SMOKE_SIZES+=("$t.pipeline_num_transformer_layers='[[1],[1]]'") ;;
        actor_rollout_ref.actor.optim.lr_warmup_steps=*)   # shorter than the run
            SMOKE_SIZES+=(actor_rollout_ref.actor.optim.lr_warmup_steps=1) ;;
        +reward.reward_kwargs.max_resp_len=*)
            SMOKE_SIZES+=(reward.reward_kwargs.max_resp_len=16 reward.reward_kwargs.overlong_buffer_cfg.len=8) ;;
        esac
    done
    ARGS+=("${SMOKE_SIZES[@]}")
}

# SMOKE_DTYPE=float32: rollout and trainer agree to 1e-5, which shows that they are the same model. MindSpeed's swapped
# optimizer then is left out: it knows only parameters of 16 bits.
smoke_float32() {
    local t=actor_rollout_ref.actor.megatron.override_transformer_config
    SMOKE_SIZES+=(actor_rollout_ref.rollout.dtype=float32)
    if [ "$1" = megatron ]; then
        SMOKE_SIZES+=(actor_rollout_ref.actor.megatron.dtype=float32 actor_rollout_ref.ref.megatron.dtype=float32)
        if [ "$(setting "$t.swap_optimizer")" = True ]; then SMOKE_SIZES+=("~$t.swap_optimizer"); fi
    else
        SMOKE_SIZES+=(actor_rollout_ref.actor.fsdp_config.dtype=float32 ${FSDP_FLOAT32:+"$FSDP_FLOAT32"})
    fi
}

# smoke_data moe|'' DATA_DIR CHECKPOINT|'': the tiny model and its task, and its Megatron checkpoint. Created once.
smoke_data() {
    local even=()
    if [[ "$2" == *_even ]]; then even=(--even); fi
    mkdir -p "$(dirname "$2")"
    (
        flock 9
        if [ "$1" = moe ]; then
            python -m ascend_rl.tiny --out "$2" --moe --warm-start 0.85 "${even[@]}"
            [ -z "$3" ] || [ -e "$3" ] || python "$ROOT/converter_hf_to_mcore.py" --hf_model_path "$2/model" --output_path "$3"
        else
            python -m ascend_rl.tiny --out "$2" "${even[@]}"
        fi
    ) 9>>"$2.lock"
}
