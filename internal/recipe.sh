# shellcheck shell=bash
# Sourced after common.sh by the recipes of real models: where they run, their inputs, shared settings, and SMOKE=1.
# Functions without arguments append to the recipe's array ARGS.

smoking() {
    [ "${SMOKE:-0}" = 1 ]
}

# dies NNODES NPUS_PER_NODE: the size a recipe is made for, unless variables of these names override it. With SMOKE=1 the
# overrides stay those of that size; NPUS_PER_NODE then is the number of workers on this CPU.
dies() {
    SMOKE_WORKERS="${NPUS_PER_NODE:-1}"
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
# OVERLONG_LEN tokens cost up to OVERLONG_FACTOR.
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

# Where it runs and where results go. A rollout of 32K responses takes up to two hours, during which ranks wait for each
# other: verl's default of 600 s would end the run.
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
}

# vLLM with decode graphs. Reads MAX_PROMPT, MAX_RESPONSE, MAX_NUM_SEQS, GRAPH_SIZES and GPU_MEMORY, and of the environment
# ENABLE_SAM, NUM_SPECULATIVE_TOKENS, ENABLE_NPUGRAPH_EX, ENABLE_STATIC_KERNEL and HCCL_TP_EXPANSION_MODE
# (docs/npu_options.md).
rollout_with_graphs() {
    local vllm=+actor_rollout_ref.rollout.engine_kwargs.vllm
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
        "$vllm".compilation_config.cudagraph_mode=FULL_DECODE_ONLY
        actor_rollout_ref.rollout.calculate_log_probs=True  # training/rollout_probs_diff_* shows whether it is the same model
    )
    if [ "${ENABLE_SAM:-0}" = 1 ]; then
        ARGS+=(
            "$vllm".speculative_config.method=sam
            "$vllm".speculative_config.num_speculative_tokens="${NUM_SPECULATIVE_TOKENS:-3}"
        )
    fi
    if [ "${ENABLE_NPUGRAPH_EX:-0}" = 1 ]; then ARGS+=("$vllm".additional_config.enable_npugraph_ex=True); fi
    if [ "${ENABLE_STATIC_KERNEL:-0}" = 1 ]; then ARGS+=("$vllm".additional_config.enable_static_kernel=True); fi
    if [ -n "${HCCL_TP_EXPANSION_MODE:-}" ]; then
        ARGS+=("$vllm".additional_config.hccl_op_expansion_mode.tp="$HCCL_TP_EXPANSION_MODE")
    fi
}

# MindSpeed's options for any Megatron model. verl's `repatch` passes override_transformer_config to MindSpeed.
mindspeed() {
    local t=+actor_rollout_ref.actor.megatron.override_transformer_config
    ARGS+=(
        "$t".use_flash_attn=True            # TND flash attention; without it "Please set micro_batch_size or use_flash_attn"
        "$t".use_fused_rotary_pos_emb=True
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

# What a CPU does not support. SMOKE=1 removes these overrides if a recipe has them, and nothing else.
NOT_ON_CPU=(
    # MindSpeed needs torch_npu: its fused operators, its ring attention, its optimizer and its MoE schedules.
    use_flash_attn use_fused_rotary_pos_emb use_fused_swiglu swap_optimizer
    context_parallel_size context_parallel_algo cp_window_size use_cp_send_recv_overlap use_fused_ring_attention_update
    moe_alltoall_overlap_comm moe_zero_memory gemm_gradient_accumulation_fusion
    # Read only by MindSpeed; unknown to megatron-core.
    seq_length pipeline_num_transformer_layers
    # TransformerEngine's fused kernel; its stub has none.
    moe_permute_fusion
    # Sizes: how 94 layers are split into 4 stages.
    num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
)

# smoke dense|moe fsdp|megatron: with SMOKE=1, run the recipe on a CPU: append overrides that replace sizes and devices, and
# remove NOT_ON_CPU. Algorithm, loss, sampling, reward and strategy stay as in the recipe. Call it last.
smoke() {
    smoking || return 0
    local data="$ROOT/data/tiny" t=actor_rollout_ref.actor.megatron.override_transformer_config
    local updates=$((TRAIN_BATCH / MINI_BATCH)) name argument
    if [ "$1" = moe ]; then data="$ROOT/data/tiny_moe"; fi
    if [ "${DRY_RUN:-0}" != 1 ]; then smoke_data "$1" "$data" >&2; fi

    # Sizes: model, data, lengths, batches (as many updates per step as before), parallel sizes, length of the run.
    local sizes=(
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
        actor_rollout_ref.rollout.tensor_model_parallel_size=1
        actor_rollout_ref.rollout.data_parallel_size=1
        actor_rollout_ref.rollout.expert_parallel_size=1
        actor_rollout_ref.rollout.max_model_len=64
        actor_rollout_ref.rollout.max_num_seqs=64
        actor_rollout_ref.rollout.max_num_batched_tokens=1024
        actor_rollout_ref.rollout.agent.num_workers=1
        actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=16
        +actor_rollout_ref.rollout.engine_kwargs.vllm.num_gpu_blocks_override=128
        reward.num_workers=1
        trainer.nnodes=1
        trainer.n_gpus_per_node="$SMOKE_WORKERS"
        trainer.total_training_steps="${STEPS:-2}"
        trainer.val_before_train=False
        trainer.test_freq=-1
        trainer.save_freq=-1
        trainer.resume_mode=disable
    )
    # The device: float32, so that rollout and trainer can be compared to 1e-5; no offloading, no graphs, no sleep.
    local device=(
        trainer.device=cpu
        actor_rollout_ref.rollout.dtype=float32
        actor_rollout_ref.rollout.enforce_eager=True
        actor_rollout_ref.rollout.free_cache_engine=False
        +actor_rollout_ref.rollout.enable_sleep_mode=False
        +actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=uni
    )
    if [ "$2" = megatron ]; then
        sizes+=(
            actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1
            actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
            actor_rollout_ref.actor.megatron.context_parallel_size=1
        )
        if [ "$1" = moe ]; then
            sizes+=(actor_rollout_ref.actor.megatron.expert_model_parallel_size="$SMOKE_WORKERS")
        fi
        device+=(
            actor_rollout_ref.actor.megatron.dtype=float32
            actor_rollout_ref.ref.megatron.dtype=float32
            actor_rollout_ref.actor.megatron.param_offload=False
            actor_rollout_ref.actor.megatron.grad_offload=False
            actor_rollout_ref.actor.megatron.optimizer_offload=False
            actor_rollout_ref.ref.megatron.param_offload=False
        )
    else
        sizes+=(actor_rollout_ref.actor.ulysses_sequence_parallel_size=1)
        # Packed sequences, and with them Ulysses, need flash attention.
        device+=(
            actor_rollout_ref.model.use_remove_padding=False
            +actor_rollout_ref.model.override_config.attn_implementation=sdpa
            actor_rollout_ref.actor.fsdp_config.dtype=float32
            actor_rollout_ref.actor.fsdp_config.param_offload=False
            actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
            actor_rollout_ref.ref.fsdp_config.param_offload=False
        )
    fi
    for argument in "${ARGS[@]}"; do
        case "$argument" in
        actor_rollout_ref.actor.megatron.use_dist_checkpointing=True)
            sizes+=(actor_rollout_ref.actor.megatron.dist_checkpointing_path="${data}_mcore") ;;
        actor_rollout_ref.ref.megatron.use_dist_checkpointing=True)
            sizes+=(actor_rollout_ref.ref.megatron.dist_checkpointing_path="${data}_mcore") ;;
        actor_rollout_ref.actor.optim.lr_warmup_steps=*)   # shorter than the run
            sizes+=(actor_rollout_ref.actor.optim.lr_warmup_steps=1) ;;
        +reward.reward_kwargs.max_resp_len=*)
            sizes+=(reward.reward_kwargs.max_resp_len=16 reward.reward_kwargs.overlong_buffer_cfg.len=8) ;;
        esac
        for name in "${NOT_ON_CPU[@]}"; do
            case "$argument" in "+$t.$name="*) device+=("~$t.$name") ;; esac
        done
    done
    ARGS+=("${sizes[@]}" "${device[@]}")
}

# smoke_data dense|moe DATA_DIR: the tiny model and its task, and for MoE its Megatron checkpoint. Created once.
smoke_data() {
    mkdir -p "$(dirname "$2")"
    (
        flock 9
        if [ "$1" = moe ]; then
            python -m ascend_rl.tiny --out "$2" --moe --warm-start 0.85
            [ -e "${2}_mcore" ] ||
                python "$ROOT/converter_hf_to_mcore.py" --hf_model_path "$2/model" --output_path "${2}_mcore"
        else
            python -m ascend_rl.tiny --out "$2"
        fi
    ) 9>>"$2.lock"
}
