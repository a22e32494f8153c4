# finds: algorithm.substring_reward
# The reward looks for the ground truth anywhere in the response.
. "$(dirname "$0")/fsdp.bash"
SET[reward.custom_reward_function.path]="$(dirname "$0")/reward_substring.py" #-
SET[reward.custom_reward_function.path]="$(dirname "$0")/reward_exact.py" #+
run "$@"
