# shellcheck shell=bash
# Sourced by every recipe, which is then sizes, ARGS with what differs, and a call of `recipe`. Functions without arguments
# append to the array ARGS; of a key that is given twice the later value counts.
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
case "${1:-}" in -h | --help) usage "$0"; exit 0 ;; esac
ARGS=() GSPO_LOW=0.0003 GSPO_HIGH=0.0004  # bounds of the paper

# recipe MODEL LOSS OVERRIDES...: run it. MODEL is a function of internal/*_layout.sh, LOSS one of those below.
recipe() {
    local differs=("${ARGS[@]}") file
    for file in "$ROOT"/internal/*_layout.sh; do
        # shellcheck source=qwen3_235b_layout.sh
        . "$file"
    done
    OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/$(basename "$0" .sh | sed 's/^train_//')}"
    use_python
    ARGS=()
    "$1"
    "$2"
    ARGS=(
        data.train_files="$TRAIN_FILE"
        data.val_files="$TEST_FILE"
        data.max_prompt_length="$MAX_PROMPT"
        data.max_response_length="$MAX_RESPONSE"
        data.filter_overlong_prompts=True
        data.truncation=error
        data.train_batch_size="$TRAIN_BATCH"
        algorithm.adv_estimator=grpo    # advantages relative to the mean of a prompt's responses
        algorithm.use_kl_in_reward=False
        actor_rollout_ref.model.path="$MODEL_PATH"
        actor_rollout_ref.actor.entropy_coeff=0
        actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH"
        actor_rollout_ref.rollout.name=vllm
        actor_rollout_ref.rollout.calculate_log_probs=True  # to compare with the trainer's: is it the same model?
        trainer.nnodes="$NNODES"
        trainer.n_gpus_per_node="$NPUS_PER_NODE"
        "trainer.logger=[console,file,tensorboard]"
        trainer.project_name=ascend_rl
        trainer.experiment_name="$(basename "$OUTPUT_DIR")"
        trainer.default_local_dir="$OUTPUT_DIR/checkpoints"
        hydra.run.dir="$OUTPUT_DIR/hydra"
        "${ARGS[@]}" "${differs[@]}"
    )
    switches
    OVERRIDES=("${@:3}")
    if [ -f "$STACK_DIR/recipe.sh" ]; then
        # shellcheck source=../stacks/cann9.1/recipe.sh
        . "$STACK_DIR/recipe.sh"
        stack
    fi
    settle
    smoke
    train verl.trainer.main_ppo "${ARGS[@]}" "${OVERRIDES[@]}"
}

# roll CONFIGURATION OVERRIDES...: run a recipe of ROLL, with a file of internal/roll/conf.
roll() {
    . "$ROOT/internal/roll/roll_env.sh"
    [ ! -x "$VENV/bin/python" ] || export PATH="$VENV/bin:$PATH"
    export OUTPUT_DIR="${OUTPUT_DIR:-$ROOT/outputs/$1}" ROLL_DATA="${ROLL_DATA:-$ROOT/frameworks/roll/data}"
    export ROLL_LOG_DIR="${ROLL_LOG_DIR:-$OUTPUT_DIR/logs}" # not in the current directory
    train ascend_rl.launch.start_roll "$@"
}

# settle: each key once, where it is given first, with its last value. Hydra takes options only before all overrides.
settle() {
    local argument key place options=() settled=()
    local -A at=()
    for argument in "${ARGS[@]}"; do
        key="${argument%%=*}" key="${key#+}" place="${at[$key]:-}"
        if [[ "$argument" == --* ]]; then
            options+=("$argument")
        elif [ -n "$place" ]; then
            settled[place]="${settled[place]%%=*}=${argument#*=}"
        else
            at[$key]=${#settled[@]}
            settled+=("$argument")
        fi
    done
    ARGS=("${options[@]}" "${settled[@]}")
}

# setting KEY: the last value that the recipe gives KEY, or nothing.
setting() {
    local argument value=
    for argument in "${ARGS[@]}"; do
        case "$argument" in "$1="* | "+$1="*) value="${argument#*=}" ;; esac
    done
    echo "$value"
}

# What the layouts need.

# dies NNODES NPUS_PER_NODE: the size a recipe is made for, unless variables of these names override it. With SMOKE=1 the
# overrides stay those of that size, until `smoke` replaces them.
dies() {
    if switched SMOKE; then NNODES="$1" NPUS_PER_NODE="$2"; fi
    NNODES="${NNODES:-$1}" NPUS_PER_NODE="${NPUS_PER_NODE:-$2}"
    DIES=$((NNODES * NPUS_PER_NODE))
}

# whole NUMBER DIVISOR MESSAGE: stop unless DIVISOR divides NUMBER.
whole() {
    [ "$2" -gt 0 ] && [ $(($1 % $2)) = 0 ] || die "$3: $1 is not a multiple of $2"
}

# input PATH WHAT_TO_DO: stop unless an input exists. A dry run needs none, and SMOKE=1 brings its own.
input() {
    [ -e "$1" ] || [ "${DRY_RUN:-0}" = 1 ] || switched SMOKE || die "'$1' not found; $2"
}

# inputs MODEL DATASET VALIDATION: set and check MODEL_PATH, TRAIN_FILE and TEST_FILE. With several nodes all of them, and
# OUTPUT_DIR, must be on shared storage.
inputs() {
    MODEL_PATH="${MODEL_PATH:-$ROOT/models/${1##*/}}"
    TRAIN_FILE="${TRAIN_FILE:-$ROOT/data/$2/train.parquet}"
    TEST_FILE="${TEST_FILE:-$ROOT/data/$3/test.parquet}"
    input "$MODEL_PATH/config.json" "set MODEL_PATH, or: bash download_weights.sh $1 --out $MODEL_PATH"
    input "$TRAIN_FILE" "set TRAIN_FILE, or: python -m ascend_rl.data $2 --out $ROOT/data/$2"
    input "$TEST_FILE" "set TEST_FILE, or: python -m ascend_rl.data $3 --out $ROOT/data/$3"
}

# A real model on NPUs. A rollout of 32K responses takes up to two hours, during which ranks wait for each other: verl's
# default of 600 s would end the run. Reads TOKENS, the budget of a micro-batch on a die: the longest sequence, or the part of
# it that context or sequence parallelism leaves.
on_npus() {
    ARGS+=(
        # The reward compares the answer in a response mathematically with the ground truth.
        reward.custom_reward_function.path="$ROOT/ascend_rl/recipe/math_reward.py"
        reward.custom_reward_function.name=compute_score
        trainer.device=npu
        actor_rollout_ref.nccl_timeout=7200
        actor_rollout_ref.actor.optim.lr=1e-6
        actor_rollout_ref.actor.use_torch_compile=False     # inductor has no NPU backend: raise e.remove_dynamo_frames()
        actor_rollout_ref.actor.use_dynamic_bsz=True
        actor_rollout_ref.actor.whole_batch_loss=True
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$TOKENS"

        actor_rollout_ref.rollout.n=16
        actor_rollout_ref.rollout.max_model_len=$((MAX_PROMPT + MAX_RESPONSE))
        # Of a prefill step, whose peak reduces the KV cache; fewer tokens split prefills into chunks (docs/training_memory.md).
        actor_rollout_ref.rollout.max_num_batched_tokens=$((MAX_PROMPT + MAX_RESPONSE))
        actor_rollout_ref.rollout.enable_chunked_prefill=True

        trainer.val_before_train=False
        trainer.test_freq=-1
        trainer.save_freq=10
        trainer.max_actor_ckpt_to_keep=2
    )
}

# decode_graphs MAX_NUM_SEQS SIZES: vLLM replays a graph in each decode step, of the smallest size that the batch fits.
decode_graphs() {
    ARGS+=(
        actor_rollout_ref.rollout.max_num_seqs="$1"
        actor_rollout_ref.rollout.enforce_eager=False
        actor_rollout_ref.rollout.cudagraph_capture_sizes="$2"
        +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY
    )
}

# experts_everywhere TP: one vLLM server over all dies, so that a die holds 128 / DIES of the experts.
experts_everywhere() {
    whole 128 "$DIES" "the rollout spreads 128 experts over $DIES dies"
    ARGS+=(
        actor_rollout_ref.rollout.tensor_model_parallel_size="$1"
        actor_rollout_ref.rollout.data_parallel_size=$((DIES / $1))
        actor_rollout_ref.rollout.expert_parallel_size="$DIES"  # verl 0.7.1 supports DP only with EP
    )
}

# sampling_of_the_paper: all tokens in training, top_p in validation.
sampling_of_the_paper() {
    local rollout=actor_rollout_ref.rollout of
    ARGS+=("$rollout.top_p=1.0")
    for of in "$rollout" "$rollout.val_kwargs"; do ARGS+=("$of.temperature=1.0" "$of.top_k=-1"); done
    ARGS+=("$rollout.val_kwargs.do_sample=True" "$rollout.val_kwargs.top_p=0.7" trainer.total_epochs=10)
    ARGS+=(actor_rollout_ref.actor.optim.weight_decay=0.1)
}

# fsdp STRATEGY: Ulysses over SP dies; memory is saved by offload, recomputed activations and a recomputed entropy.
fsdp() {
    whole "$DIES" "$SP" "DIES must be a multiple of SP"
    ARGS+=(
        actor_rollout_ref.model.use_remove_padding=True
        actor_rollout_ref.model.enable_gradient_checkpointing=True
        actor_rollout_ref.actor.strategy="$1"
        actor_rollout_ref.actor.ulysses_sequence_parallel_size="$SP"
        actor_rollout_ref.actor.fsdp_config.param_offload=True
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
        actor_rollout_ref.actor.entropy_checkpointing=True
        actor_rollout_ref.ref.fsdp_config.param_offload=True
        actor_rollout_ref.actor.grad_clip=1.0
    )
}

# megatron TP PP CP: Hugging Face weights through mbridge; parameters and gradients are offloaded.
megatron() {
    if [ "$3" = 1 ]; then
        whole "$DIES" $(($1 * $2)) "DIES must be a multiple of TP x PP = $1 x $2"
    else
        whole "$DIES" $(($1 * $2 * $3)) "DIES must be a multiple of TP x PP x CP = $1 x $2 x $3"
    fi
    ARGS+=(
        --config-name=ppo_megatron_trainer
        actor_rollout_ref.actor.strategy=megatron
        actor_rollout_ref.actor.megatron.use_mbridge=True
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$1"
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$2"
        actor_rollout_ref.actor.megatron.param_offload=True
        actor_rollout_ref.actor.megatron.grad_offload=True
        actor_rollout_ref.ref.megatron.param_offload=True
        actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8   # unused with dynamic batches, but required by verl
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4
        # TND flash attention; without it "Please set micro_batch_size or use_flash_attn".
        +actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True
    )
}

# Keep only the input of each layer and recompute the rest in the backward pass: a third more compute, 33 GiB less in a 32B
# model (docs/training_memory.md).
recompute_layers() {
    local t=actor_rollout_ref.actor.megatron.override_transformer_config
    ARGS+=("$t.recompute_granularity=full" "$t.recompute_method=uniform" "$t.recompute_num_layers=1")
}

# Long responses of Qwen3-32B and 235B with Megatron and MindSpeed, as practised; reads CP. verl's `repatch` passes
# override_transformer_config to MindSpeed.
mindspeed() {
    local t=+actor_rollout_ref.actor.megatron.override_transformer_config
    ARGS+=(
        data.shuffle=False
        actor_rollout_ref.actor.megatron.sequence_parallel=True
        actor_rollout_ref.actor.optim.clip_grad=10000
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
        "$t".use_fused_rotary_pos_emb=True
        "$t".position_embedding_type=rope   # which the option above asks MindSpeed for, and only Megatron's own arguments have
        "$t".use_fused_swiglu=True

        # Optimizer states stay on the host and are streamed in, overlapped, when the update needs them; verl's own offload
        # stays off: it would bring all of them back for the update (docs/training_memory.md).
        "$t".swap_optimizer=True
        actor_rollout_ref.actor.megatron.optimizer_offload=False

        # Ring attention over CP dies.
        actor_rollout_ref.actor.megatron.context_parallel_size="$CP"
        "$t".context_parallel_size="$CP"
        "$t".context_parallel_algo=megatron_cp_algo
        "$t".cp_window_size=1
        "$t".use_cp_send_recv_overlap=True
        "$t".use_fused_ring_attention_update=True
        "$t".seq_length=2048                # size of the compressed causal mask, not a limit

        actor_rollout_ref.rollout.temperature=0.9
        actor_rollout_ref.rollout.data_rebalance=True       # the samples of a prompt go to different servers
        trainer.balance_batch=False
        trainer.total_epochs=1
    )
}

# The losses.

# Token-level ratios, PPO's clipping, no KL term.
ppo() {
    ARGS+=(
        algorithm.kl_ctrl.kl_coef=0.0
        actor_rollout_ref.actor.use_kl_loss=False
        actor_rollout_ref.actor.kl_loss_coef=0.0
    )
}

# The same with a KL term.
grpo() {
    ARGS+=(
        actor_rollout_ref.actor.use_kl_loss=True
        actor_rollout_ref.actor.kl_loss_coef=0.001
        actor_rollout_ref.actor.kl_loss_type=low_var_kl
    )
}

# Ratios and clipping per response (docs/gspo.md); a layout may have other bounds.
gspo() {
    ppo
    ARGS+=(
        actor_rollout_ref.actor.policy_loss.loss_mode=gspo
        actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean
        actor_rollout_ref.actor.clip_ratio_low="$GSPO_LOW"
        actor_rollout_ref.actor.clip_ratio_high="$GSPO_HIGH"
    )
}

# DAPO (docs/dapo.md): a higher upper bound, all tokens weighted equally, responses sampled by vLLM corrected towards the
# trainer's policy (token ratios, capped at 2), and dynamic sampling: groups whose responses are all right or all wrong have
# zero advantage. They are left out, and more prompts are sampled until the batch is full.
dapo() {
    ppo
    ARGS+=(
        actor_rollout_ref.actor.clip_ratio_low=0.2
        actor_rollout_ref.actor.clip_ratio_high=0.28
        actor_rollout_ref.actor.clip_ratio_c=10.0
        actor_rollout_ref.actor.loss_agg_mode=token-mean
        algorithm.rollout_correction.rollout_is=token
        algorithm.rollout_correction.rollout_is_threshold=2.0
        algorithm.filter_groups.enable=True
        algorithm.filter_groups.metric=acc
        algorithm.filter_groups.max_num_gen_batches=10
    )
    overlong_penalty
}

# DAPO's reward manager, for the penalty on responses close to the length limit: off unless OVERLONG is True. Then the last
# OVERLONG_LEN tokens cost up to OVERLONG_FACTOR; at most 0.5, since rewards are 0 and 1 (docs/recipes.md).
overlong_penalty() {
    local of=+reward.reward_kwargs
    ARGS+=(
        reward.reward_manager.name=dapo
        "$of".max_resp_len="$MAX_RESPONSE"
        "$of".overlong_buffer_cfg.enable=False
        "$of".overlong_buffer_cfg.len="$OVERLONG_LEN"
        "$of".overlong_buffer_cfg.penalty_factor="$OVERLONG_FACTOR"
        "$of".overlong_buffer_cfg.log=False
    )
}

# The switches.

# switched NAME: whether the variable NAME switches its feature on: 1 or true. Stops at anything but these, 0, false and nothing.
switched() {
    case "${!1:-0}" in
    1 | [Tt]rue | TRUE) ;;
    0 | [Ff]alse | FALSE) return 1 ;;
    *) die "$1=${!1}: give 1 or 0" ;;
    esac
}

# switches: append what variables of ascend_rl/settings/switches.txt set, by their column `taken`:
#   value   by every recipe as the value of the key        flag   the same, on or off
#   own     by recipes that have the key; others stop here, since it would be ignored
#   code    by the function switch_NAME
# What the recipe's rollout cannot do is passed on too: the linter and verl's server refuse it by name.
switches() {
    local name key taken rest value
    while IFS=' |' read -r name key taken rest; do
        [[ "$name" == [A-Z]* && -n "${!name:-}" ]] || continue
        value="${!name}"
        case "$taken" in
        value) ARGS+=("$key=$value") ;;
        flag) if switched "$name"; then ARGS+=("$key=True"); fi ;;
        own)
            if [ -n "$(setting "$key")" ]; then
                ARGS+=("$key=$value")
            elif [ "$value" != False ]; then
                die "$name=$value has no effect in this recipe; unset it, or give $key=$value after the scripts"
            fi ;;
        code) "switch_$name" ;;
        esac
    done <"$ROOT/ascend_rl/settings/switches.txt"
}

# Drafts from text seen before, in batches of up to a quarter of max_num_seqs (verl's default: 1024): larger ones gain nothing.
switch_ENABLE_SAM() {
    local vllm=+actor_rollout_ref.rollout.engine_kwargs.vllm requests
    switched ENABLE_SAM || return 0
    requests="$(setting actor_rollout_ref.rollout.max_num_seqs)"
    ARGS+=(
        "$vllm".speculative_config.method=sam
        "$vllm".speculative_config.num_speculative_tokens="${NUM_SPECULATIVE_TOKENS:-3}"
        "$vllm".additional_config.bs_threshold_for_spec_decode=$((${requests:-1024} / 4))
    )
}

# The engines admit the longest first, and no more than have room until they end.
switch_LENGTH_SCHEDULER() {
    switched LENGTH_SCHEDULER || return 0
    ARGS+=(+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=ascend_rl.glue.length_scheduler.scheduler)
}

# verl itself reads the variable. Moves at the end of a rollout gain nothing below the smallest graph: halve it, down to a
# multiple of TP.
switch_ROLLOUT_REBALANCE_ENABLE() {
    local key=actor_rollout_ref.rollout.cudagraph_capture_sizes tp sizes smallest
    switched ROLLOUT_REBALANCE_ENABLE || return 0
    sizes="$(setting "$key")" sizes="${sizes#[}" smallest="${sizes%%[],]*}"
    tp="$(setting actor_rollout_ref.rollout.tensor_model_parallel_size)"
    [ -n "$sizes" ] || return 0
    while [ $((smallest % 2)) = 0 ] && [ $((smallest / 2 % ${tp:-1})) = 0 ] && [ "$smallest" -gt 4 ]; do
        smallest=$((smallest / 2)) sizes="$smallest,$sizes"
    done
    ARGS+=("$key=[$sizes")
}

# The update of an MoE takes the routes of the log-probs (R2), or of the rollout (R3), so that no token's ratio changes because
# another expert computed it (docs/recipes.md).
switch_ROUTER_REPLAY() {
    local of=actor_rollout_ref.actor.megatron
    [ "$STACK" != cann8.5 ] || die "ROUTER_REPLAY=$ROUTER_REPLAY needs verl 0.9.1: set STACK=cann9.1, or unset it"
    [ -n "$(setting "$of".expert_model_parallel_size)" ] ||
        die "ROUTER_REPLAY=$ROUTER_REPLAY: the model has no experts, or Megatron does not train it; unset it"
    case "$ROUTER_REPLAY" in
    R2) ;;
    R3) ARGS+=(actor_rollout_ref.rollout.enable_rollout_routing_replay=True) ;;
    *) die "ROUTER_REPLAY=$ROUTER_REPLAY: give R2 (the routes of the log-probs) or R3 (those of the rollout)" ;;
    esac
    ARGS+=("$of.router_replay.mode=$ROUTER_REPLAY")
}

# verl's NPU profiler in chosen steps of chosen ranks: PROFILE=STEPS[:RANKS], such as 3 or 3,4:0,16 (docs/watching.md). The
# ranks are the trainer's, and the rollout's replicas of the same numbers. Each phase is a database of its own.
switch_PROFILE() {
    local steps="${PROFILE%%:*}" ranks="${PROFILE#*:}" of=actor_rollout_ref.actor.profiler
    [ "$(setting trainer.device)" = npu ] ||
        die "PROFILE=$PROFILE: the profiler is that of NPUs; unset it for a run on CPUs"
    [[ "$PROFILE" =~ ^[1-9][0-9]*(,[1-9][0-9]*)*(:[0-9]+(,[0-9]+)*)?$ ]] ||
        die "PROFILE=$PROFILE: give steps, or steps:ranks, such as 3 or 3,4:0,16"
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
