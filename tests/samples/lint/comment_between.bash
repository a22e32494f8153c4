# finds: script.continuation
# A comment ends the command that it interrupts.
. "$(dirname "$0")/megatron.bash"
run trainer.test_freq=5 \
    # checkpoints \#-
    trainer.log_val_generations=5 "$@"
