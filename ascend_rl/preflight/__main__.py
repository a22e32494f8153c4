"""The command ``python -m ascend_rl.preflight``: see preflight.py."""

import sys

from ascend_rl.preflight.preflight import main

if __name__ == "__main__":
    sys.exit(main())
