"""The command ``python -m ascend_rl.memory_plan``: see ascend_rl/planning/memory_plan.py."""

import sys

from ascend_rl.planning.memory_plan import main

if __name__ == "__main__":
    sys.exit(main())
