# shellcheck shell=bash
# Sourced after common.sh by the recipes of real models: where they run, their inputs, shared settings, and SMOKE=1.
# Functions without arguments append to the recipe's array ARGS.

# switched NAME: whether the variable NAME switches its feature on: 1 or true. Stops at anything but these, 0, false and nothing.
switched() {
    case "${!1:-0}" in
    1 | [Tt]rue | TRUE) ;;
    0 | [Ff]alse | FALSE) return 1 ;;
    *) die "$1=${!1}: give 1 or 0" ;;
    esac
}

smoking() {
    switched SMOKE
}

# dies NNODES NPUS_PER_NODE: the size a recipe is made for, unless variables of these names override it. With SMOKE=1 the
# overrides stay those of that size, until `smoke` replaces them.
dies() {
    if smoking; then NNODES="$1" NPUS_PER_NODE="$2"; fi
    NNODES="${NNODES:-$1}" NPUS_PER_NODE="${NPUS_PER_NODE:-$2}"
    # shellcheck disable=SC2034
    DIES=$((NNODES * NPUS_PER_NODE))
}

# whole NUMBER DIVISOR MESSAGE: stop unless DIVISOR divides NUMBER.
whole() {
    [ "$2" -gt 0 ] && [ $(($1 % $2)) = 0 ] || die "$3: $1 is not a multiple of $2"
}

# input PATH WHAT_TO_DO: stop unless an input exists. A dry run needs none, and SMOKE=1 brings its own.
input() {
    [ -e "$1" ] || [ "${DRY_RUN:-0}" = 1 ] || smoking || die "'$1' not found; $2"
}

# inputs MODEL DATASET VALIDATION: set and check MODEL_PATH, TRAIN_FILE, TEST_FILE and OUTPUT_DIR. With several nodes all of
# them must be on shared storage.
inputs() {
    local name
    name="$(basename "$0" .sh)"
    MODEL_PATH="${MODEL_PATH:-$ROOT/models/${1##*/}}"
    TRAIN_FILE="${TRAIN_FILE:-$ROOT/data/$2/train.parquet}"
    TEST_FILE="${TEST_FILE:-$ROOT/data/$3/test.parquet}"
    OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/${name#train_}}"
    input "$MODEL_PATH/config.json" "set MODEL_PATH, or: bash download_weights.sh $1 --out $MODEL_PATH"
    input "$TRAIN_FILE" "set TRAIN_FILE, or: python -m ascend_rl.data $2 --out $ROOT/data/$2"
    input "$TEST_FILE" "set TEST_FILE, or: python -m ascend_rl.data $3 --out $ROOT/data/$3"
}

# The reward compares the answer in a response mathematically with the ground truth.
math_reward() {
    ARGS+=(
        reward.custom_reward_function.path="$ROOT/ascend_rl/recipe/math_reward.py"
        reward.custom_reward_function.name=compute_score
    )
}

# DAPO's reward manager, for the penalty on responses close to the length limit: off unless OVERLONG is True. Then the last
# OVERLONG_LEN tokens cost up to OVERLONG_FACTOR; at most 0.5, since rewards are 0 and 1 (docs/recipes.md).
overlong_penalty() {
    ARGS+=(
        reward.reward_manager.name=dapo
        +reward.reward_kwargs.max_resp_len="$MAX_RESPONSE"
        +reward.reward_kwargs.overlong_buffer_cfg.enable="${OVERLONG:-False}"
        +reward.reward_kwargs.overlong_buffer_cfg.len="$OVERLONG_LEN"
        +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor="$OVERLONG_FACTOR"
        +reward.reward_kwargs.overlong_buffer_cfg.log=False
    )
}

# DAPO's settings around the policy loss: no KL term, a higher upper bound, all tokens weighted equally, and responses
# sampled by vLLM corrected towards the trainer's policy (token ratios, capped at 2).
dapo_loss() {
    ARGS+=(
        algorithm.use_kl_in_reward=False
        algorithm.kl_ctrl.kl_coef=0.0
        actor_rollout_ref.actor.use_kl_loss=False
        actor_rollout_ref.actor.kl_loss_coef=0.0
        actor_rollout_ref.actor.clip_ratio_low=0.2
        actor_rollout_ref.actor.clip_ratio_high=0.28
        actor_rollout_ref.actor.clip_ratio_c=10.0
        actor_rollout_ref.actor.loss_agg_mode=token-mean
        algorithm.rollout_correction.rollout_is=token
        algorithm.rollout_correction.rollout_is_threshold=2.0
    )
}

# DAPO's dynamic sampling: groups whose responses are all right or all wrong have zero advantage. They are left out, and
# more prompts are sampled until the batch is full (docs/dapo.md).
dynamic_sampling() {
    ARGS+=(
        algorithm.filter_groups.enable=True
        algorithm.filter_groups.metric=acc
        algorithm.filter_groups.max_num_gen_batches=10
    )
}

# verl's NPU profiler in chosen steps of chosen ranks: PROFILE=STEPS[:RANKS], such as 3 or 3,4:0,16 (docs/watching.md). The
# ranks are the trainer's, and the rollout's replicas of the same numbers. Each phase is a database of its own.
profile() {
    [ -n "${PROFILE:-}" ] || return 0
    [[ "$PROFILE" =~ ^[1-9][0-9]*(,[1-9][0-9]*)*(:[0-9]+(,[0-9]+)*)?$ ]] ||
        die "PROFILE=$PROFILE: give steps, or steps:ranks, such as 3 or 3,4:0,16"
    local steps="${PROFILE%%:*}" ranks="${PROFILE#*:}" of=actor_rollout_ref.actor.profiler
    if [[ "$PROFILE" != *:* ]]; then ranks=0; fi
    ARGS+=(
        global_profiler.tool=npu
        "global_profiler.steps=[$steps]"
        global_profiler.save_path="$OUTPUT_DIR/profile"
        "$of".enable=True
        "$of.ranks=[$ranks]"
        "$of.tool_config.npu.contents=[npu,cpu]"
        "$of".tool_config.npu.level=level1
        "$of".tool_config.npu.discrete=True
    )
}

# Where it runs and where results go. A rollout of 32K responses takes up to two hours, during which ranks wait for each
# other: verl's default of 600 s would end the run. HCCL_TP_EXPANSION_MODE is where the rollout's TP expands its collectives.
# Call it last but for `smoke`.
trainer() {
    ARGS+=(
        trainer.device=npu
        trainer.nnodes="$NNODES"
        trainer.n_gpus_per_node="$NPUS_PER_NODE"
        actor_rollout_ref.nccl_timeout=7200
        "trainer.logger=[console,file,tensorboard]"
        trainer.project_name=ascend_rl
        trainer.experiment_name="$(basename "$OUTPUT_DIR")"
        trainer.default_local_dir="$OUTPUT_DIR/checkpoints"
        hydra.run.dir="$OUTPUT_DIR/hydra"
    )
    profile
    rollout_switches
    refuse_unread
    if [ -n "${HCCL_TP_EXPANSION_MODE:-}" ]; then
        ARGS+=(+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.hccl_op_expansion_mode.tp="$HCCL_TP_EXPANSION_MODE")
    fi
}

# vLLM with decode graphs. Reads MAX_PROMPT, MAX_RESPONSE, MAX_NUM_SEQS, GRAPH_SIZES and GPU_MEMORY.
rollout_with_graphs() {
    ARGS+=(
        actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.gpu_memory_utilization="$GPU_MEMORY"
        actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT + MAX_RESPONSE))
        # Of a prefill step, whose peak reduces the KV cache; fewer tokens split prefills into chunks (docs/training_memory.md).
        actor_rollout_ref.rollout.max_num_batched_tokens=$((MAX_PROMPT + MAX_RESPONSE))
        actor_rollout_ref.rollout.max_num_seqs="$MAX_NUM_SEQS"
        actor_rollout_ref.rollout.enable_chunked_prefill=True
        actor_rollout_ref.rollout.enforce_eager=False
        actor_rollout_ref.rollout.cudagraph_capture_sizes="$GRAPH_SIZES"
        +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY
        actor_rollout_ref.rollout.calculate_log_probs=True  # to compare with the trainer's: is it the same model?
        actor_rollout_ref.rollout.data_rebalance=True       # the samples of a prompt go to different servers
    )
}

# What the environment switches on in the rollout of every recipe: ENABLE_SAM with NUM_SPECULATIVE_TOKENS, ENABLE_NPUGRAPH_EX,
# ENABLE_STATIC_KERNEL (docs/npu_options.md) and ROLLOUT_REBALANCE_ENABLE. What the recipe's rollout cannot do is passed on
# too: the linter and verl's server refuse it by name. Call it when the rollout is set.
rollout_switches() {
    local vllm=+actor_rollout_ref.rollout.engine_kwargs.vllm requests
    if switched ENABLE_SAM; then
        # Drafts from text seen before, in batches of up to a quarter of max_num_seqs (verl's default: 1024): larger ones
        # gain nothing.
        requests="$(setting actor_rollout_ref.rollout.max_num_seqs)"
        ARGS+=(
            "$vllm".speculative_config.method=sam
            "$vllm".speculative_config.num_speculative_tokens="${NUM_SPECULATIVE_TOKENS:-3}"
            "$vllm".additional_config.bs_threshold_for_spec_decode=$((${requests:-1024} / 4))
        )
    fi
    if switched ENABLE_NPUGRAPH_EX; then ARGS+=("$vllm".additional_config.enable_npugraph_ex=True); fi
    if switched ENABLE_STATIC_KERNEL; then ARGS+=("$vllm".additional_config.enable_static_kernel=True); fi
    if switched ROLLOUT_REBALANCE_ENABLE; then smaller_graphs; fi
}

# Moves at the end of a rollout gain nothing below the smallest graph: halve it, down to a multiple of TP.
smaller_graphs() {
    local key=actor_rollout_ref.rollout.cudagraph_capture_sizes tp sizes smallest i
    tp="$(setting actor_rollout_ref.rollout.tensor_model_parallel_size)"
    for i in "${!ARGS[@]}"; do
        [[ "${ARGS[i]}" == "$key=["* ]] || continue
        sizes="${ARGS[i]#"$key=["}" smallest="${sizes%%[],]*}"
        while [ $((smallest % 2)) = 0 ] && [ $((smallest / 2 % ${tp:-1})) = 0 ] && [ "$smallest" -gt 4 ]; do
            smallest=$((smallest / 2)) sizes="$smallest,$sizes"
        done
        ARGS[i]="$key=[$sizes"
    done
}

# A variable of other recipes that this one does not take would be ignored: stop, and name the key that does the same.
refuse_unread() {
    local name key value
    while read -r name key; do
        value="$(setting "$key")"
        [ -z "${!name:-}" ] || [ "${value:-False}" = "${!name}" ] ||
            die "$name=${!name} has no effect in this recipe; unset it, or give $key=${!name} after the scripts"
    done <<'END'
OVERLONG reward.reward_kwargs.overlong_buffer_cfg.enable
LOSS_MODE actor_rollout_ref.actor.policy_loss.loss_mode
LOSS_AGG_MODE actor_rollout_ref.actor.loss_agg_mode
CLIP_RATIO_LOW actor_rollout_ref.actor.clip_ratio_low
CLIP_RATIO_HIGH actor_rollout_ref.actor.clip_ratio_high
SAVE_FREQ trainer.save_freq
WORKERS trainer.use_legacy_worker_impl
END
}

# MindSpeed's options for any Megatron model. verl's `repatch` passes override_transformer_config to MindSpeed.
mindspeed() {
    local t=+actor_rollout_ref.actor.megatron.override_transformer_config
    ARGS+=(
        "$t".use_flash_attn=True            # TND flash attention; without it "Please set micro_batch_size or use_flash_attn"
        "$t".use_fused_rotary_pos_emb=True
        "$t".position_embedding_type=rope   # which the option above asks MindSpeed for, and only Megatron's own arguments have
        "$t".use_fused_swiglu=True
    )
}

# Optimizer states stay on the host and are streamed in, overlapped, when the update needs them; verl's own offload stays
# off: it would bring all of them back for the update (docs/training_memory.md).
swap_optimizer() {
    ARGS+=(
        +actor_rollout_ref.actor.megatron.override_transformer_config.swap_optimizer=True
        actor_rollout_ref.actor.megatron.optimizer_offload=False
    )
}

# Ring attention over CP dies.
ring_attention() {
    local t=+actor_rollout_ref.actor.megatron.override_transformer_config
    ARGS+=(
        actor_rollout_ref.actor.megatron.context_parallel_size="$CP"
        "$t".context_parallel_size="$CP"
        "$t".context_parallel_algo=megatron_cp_algo
        "$t".cp_window_size=1
        "$t".use_cp_send_recv_overlap=True
        "$t".use_fused_ring_attention_update=True
        "$t".seq_length=2048                # size of the compressed causal mask, not a limit
    )
}

# setting KEY: the last value that the recipe gives KEY, or nothing.
setting() {
    local argument value=
    for argument in "${ARGS[@]}"; do
        case "$argument" in "$1="* | "+$1="*) value="${argument#*=}" ;; esac
    done
    echo "$value"
}

# split_in_two KEY...: 2 for each of these parallel sizes that the recipe has at 2 or more, else 1; multiplies SMOKE_DIES.
split_in_two() {
    local key value
    for key in "$@"; do
        value="$(setting "$key")"
        if [ "${value:-1}" -gt 1 ]; then value=2; else value=1; fi
        SMOKE_SIZES+=("$key=$value") SMOKE_DIES=$((SMOKE_DIES * value))
    done
}

# smoke dense|moe fsdp|megatron: with SMOKE=1, rehearse the recipe on a tiny model: append overrides that replace sizes. All
# else stays: device npu, graphs, sleep, offload, MindSpeed's options, loss, sampling, reward. Parallel sizes above 1 become
# 2. Call it last. What was replaced is printed at the end of the run (python -m ascend_rl.rehearsal).
smoke() {
    smoking || return 0
    local data="$ROOT/data/tiny" t=actor_rollout_ref.actor.megatron.override_transformer_config
    local updates=$((TRAIN_BATCH / MINI_BATCH)) argument gen_tp gen_dp=1 stages checkpoint
    if [ "$1" = moe ]; then data="$ROOT/data/tiny_moe"; fi
    checkpoint="${data}_mcore"
    if switched USE_ALLTOALL_OVERLAP; then checkpoint+=_overlap; fi  # another layout of the experts
    if [ "${DRY_RUN:-0}" != 1 ]; then
        python -m ascend_rl.settings.claim rehearsal "$OUTPUT_DIR" || exit 1
        smoke_data "$1" "$data" "$checkpoint" >&2
    fi

    SMOKE_DIES=1 SMOKE_SIZES=()
    if [ "$2" = megatron ]; then
        split_in_two actor_rollout_ref.actor.megatron.{tensor_model,pipeline_model,context}_parallel_size
    else
        split_in_two actor_rollout_ref.actor.ulysses_sequence_parallel_size
    fi
    if [ "$SMOKE_DIES" = 1 ]; then SMOKE_DIES=2; fi
    # The rollout: all dies are one server where experts are spread over it, else they are two.
    gen_tp="$(setting actor_rollout_ref.rollout.tensor_model_parallel_size)"
    if [ "$(setting actor_rollout_ref.rollout.expert_parallel_size)" ]; then
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
        # The model, the data, lengths, and as many updates a step as the recipe has.
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
    if [ "${SMOKE_DTYPE:-bfloat16}" = float32 ]; then smoke_float32 "$2"; fi
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
        SMOKE_SIZES+=(actor_rollout_ref.actor.fsdp_config.dtype=float32)
    fi
}

# smoke_data dense|moe DATA_DIR CHECKPOINT: the tiny model and its task, and for MoE its Megatron checkpoint. Created once.
smoke_data() {
    mkdir -p "$(dirname "$2")"
    (
        flock 9
        if [ "$1" = moe ]; then
            python -m ascend_rl.tiny --out "$2" --moe --warm-start 0.85
            [ -e "$3" ] || python "$ROOT/converter_hf_to_mcore.py" --hf_model_path "$2/model" --output_path "$3"
        else
            python -m ascend_rl.tiny --out "$2"
        fi
    ) 9>>"$2.lock"
}
