# finds: script.unquoted_arguments
# An override with a blank falls apart.
. "$(dirname "$0")/megatron.bash"
run $@ #-
run "$@" #+
