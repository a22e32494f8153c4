# finds: algorithm.filter_groups
# With a + it is accepted, and ignored.
. "$(dirname "$0")/fsdp.bash"
run +algorithm.filter_groups.enable=True "$@" #-
run "$@" #+
