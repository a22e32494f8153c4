# finds: script.continuation config.syntax
# A blank after the backslash: the next line is a command of its own.
. "$(dirname "$0")/megatron.bash"
run trainer.test_freq=5 \ #-
run trainer.test_freq=5 \#+
    trainer.log_val_generations=5 "$@"
