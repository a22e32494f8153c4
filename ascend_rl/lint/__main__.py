"""The command ``python -m ascend_rl.lint``: see lint.py."""

import sys

from ascend_rl.lint.lint import main

if __name__ == "__main__":
    sys.exit(main())
