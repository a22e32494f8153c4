# finds: script.unquoted_arguments
# An override with a blank is split into words.
. "$(dirname "$0")/megatron.bash"
run $@ #-
run "$@" #+
