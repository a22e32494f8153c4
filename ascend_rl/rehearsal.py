"""The command ``python -m ascend_rl.rehearsal``: see ascend_rl/preflight/rehearsal.py."""

from ascend_rl.preflight.rehearsal import main

if __name__ == "__main__":
    main()
