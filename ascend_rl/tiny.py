"""The command ``python -m ascend_rl.tiny``: see ascend_rl/recipe/tiny.py."""

import sys

if __name__ == "__main__":
    try:
        from ascend_rl.recipe.tiny import main

        main()
    except KeyboardInterrupt:
        sys.exit(130)
