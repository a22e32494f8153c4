"""The command ``python -m ascend_rl.export``: see ascend_rl/weights/export.py."""

from ascend_rl.weights.export import main

if __name__ == "__main__":
    raise SystemExit(main())
