"""The command ``python -m ascend_rl.preflight``: see preflight.py."""

import sys

if __name__ == "__main__":
    try:
        from ascend_rl.preflight.preflight import main

        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
