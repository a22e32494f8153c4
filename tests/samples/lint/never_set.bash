# finds: script.never_set
# The line that set gen_ep was commented out.
. "$(dirname "$0")/megatron.bash"
# gen_ep=4
run trainer.experiment_name="gspo-ep${gen_ep}" "$@" #-
run trainer.experiment_name="gspo-ep4" "$@" #+
