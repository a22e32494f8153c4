"""The command ``python -m ascend_rl.data``: see ascend_rl/recipe/data.py."""

import sys

from ascend_rl.recipe.data import main

if __name__ == "__main__":
    sys.exit(main())
