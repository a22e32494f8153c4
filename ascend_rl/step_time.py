"""The command ``python -m ascend_rl.step_time``: see ascend_rl/estimate/step_time.py."""

import sys

from ascend_rl.estimate.step_time import main

if __name__ == "__main__":
    sys.exit(main())
