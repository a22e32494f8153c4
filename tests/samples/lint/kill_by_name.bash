# finds: script.kill_by_name
# Kills the Python programs of every user, and the launcher.
. "$(dirname "$0")/megatron.bash"
pkill -9 python #-
ps -ef | grep python | grep -v grep | awk '{print $2}' | xargs -t -i kill -9 {} #-
run "$@"
